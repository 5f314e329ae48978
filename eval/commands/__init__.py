"""The commands of `python -m eval`, a file for each kind."""
