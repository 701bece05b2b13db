"""The memory of a run: estimates before anything is allocated, measurements, and budgets."""
