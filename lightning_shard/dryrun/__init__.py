"""What a layout takes, without devices: counted once on fake tensors, the rest is arithmetic."""
