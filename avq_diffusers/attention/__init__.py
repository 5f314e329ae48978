"""The operation: AVQ attention, its definition, its backends and its diagnostics."""
