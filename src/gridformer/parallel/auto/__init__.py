"""Which layouts there are, and how products communicate on one."""
