"""The largest batch of every layout under a budget, and what saving memory costs."""
