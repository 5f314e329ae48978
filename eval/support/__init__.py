"""What of diffusers AVQ supports: models, features, and diffusers' own tests."""
