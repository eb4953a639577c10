"""Fully sharded data parallelism with FSDP2, and fixes for uses of modules and parameters that FSDP2 gets wrong."""
