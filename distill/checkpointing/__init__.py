"""Checkpoints, the folder of a run, and exports."""
