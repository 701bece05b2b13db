"""Data parallelism: sums of gradients over replicas, ZeRO-1 and FSDP."""
