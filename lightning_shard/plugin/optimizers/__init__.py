"""Adapts optimizers to sharded parameters, and refuses those that can't work with them."""
