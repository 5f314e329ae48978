"""Speed: of the operation, its kernels, the UNet step and the training step."""
