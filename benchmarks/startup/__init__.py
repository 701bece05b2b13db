"""How starting grows with the number of ranks."""
