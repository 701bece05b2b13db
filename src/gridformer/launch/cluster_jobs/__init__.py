"""Scripts and manifests that start a run on many machines: `gridformer launch`."""
