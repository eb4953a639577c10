"""A LightningModule to this rank's part of it; ``assemble.py`` shows the order."""
