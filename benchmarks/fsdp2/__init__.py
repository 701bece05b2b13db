"""Whether torch's FSDP2 could take the place of gridformer's own FSDP."""
