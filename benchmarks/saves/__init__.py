"""How long training waits while a checkpoint is saved."""
