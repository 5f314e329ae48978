"""Images and captions: sources, encoding, cache and batches."""
