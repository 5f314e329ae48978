"""Vision transformers: datasets of scenes over photographs, and tables of fine-tuned models."""
