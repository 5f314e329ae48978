"""AVQ in the transformers of diffusers: joint attention, and models on the attention dispatch."""
