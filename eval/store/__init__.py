"""Results as files: JSON with provenance, Markdown tables, plots."""
