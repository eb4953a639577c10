"""Makes Lightning's summaries and monitors report the whole model."""
