"""Lightning's summaries and monitors, of the whole model."""
