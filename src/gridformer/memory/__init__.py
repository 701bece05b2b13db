"""What a run holds in memory: foretold before anything is allocated, measured, and made to fit."""
