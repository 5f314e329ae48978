"""Checkpoints of a run, and what it exports."""
