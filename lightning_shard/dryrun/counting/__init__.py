"""Counts operations and memory of one microbatch on fake tensors, part by part."""
