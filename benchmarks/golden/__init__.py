"""Numbers that a rewrite of the record must not move; see `__main__`."""
