"""A model to this rank's part, one axis a folder: FSDP2 over data ranks, tensor, expert and context parallelism."""
