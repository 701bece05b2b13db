"""Experiments of the papers, scaled down to a cluster that is emulated on one machine."""
