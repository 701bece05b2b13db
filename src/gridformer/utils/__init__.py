"""What every package may use, and what uses none of them."""
