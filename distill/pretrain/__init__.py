"""Pretraining of mini-sd: its VAE, its UNet with text encoder, and its CLIP-style scorer."""
