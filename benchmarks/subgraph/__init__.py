"""Sub-graph layouts beside data parallelism: time, messages and memory of a step."""
