"""Vision transformers: data sets of scenes over photographs, and tables of fine-tuned models."""
