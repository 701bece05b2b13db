"""How runs start on, and read, a corpus of 10^9 tokens."""
