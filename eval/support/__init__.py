"""What of diffusers AVQ supports: models and features."""
