"""What Python objects hold, walked, taken, compared and put back in place."""
