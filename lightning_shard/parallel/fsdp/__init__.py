"""Fully sharded data parallelism by FSDP2, and what users do to modules and parameters that FSDP2 alone gets wrong."""
