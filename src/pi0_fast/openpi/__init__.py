"""Checkpoints of openpi: read, and converted to ours. Nothing else in the package imports this."""
