"""The commands of `python -m eval`, one file per kind."""
