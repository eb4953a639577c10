"""Turns a LightningModule into this rank's part of it; ``assemble.py`` shows the order of the steps."""
