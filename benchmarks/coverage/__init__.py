"""Which networks of transformers train on which layouts as in one process."""
