"""Sub-graph layouts compared with data parallelism: time, messages and memory of a step."""
