"""What a run holds in memory: estimated before anything is allocated, measured, and made to fit."""
