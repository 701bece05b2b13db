"""Any network on a layout: `gridformer.parallelize`, plans by names, and what replaces modules."""
