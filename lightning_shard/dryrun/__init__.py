"""Estimates a layout's memory and time without devices: counts one microbatch on fake tensors, computes the rest."""
