"""How long a step takes on a cluster, and which layout is best."""
