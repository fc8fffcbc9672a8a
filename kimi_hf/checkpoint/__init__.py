"""Checkpoints on disk as the models meet them: names, shapes, and what is checked before a weight is read."""
