"""What a step changes beside gradients: taken note of, put back, or brought to the other stages."""
