"""The `avq` command."""
