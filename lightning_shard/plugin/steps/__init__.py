"""Runs the user's steps, once per batch or per microbatch, and brings their results to all ranks."""
