"""What this machine can do, and what to mend."""
