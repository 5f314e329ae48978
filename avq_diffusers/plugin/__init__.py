"""AVQ in the UNets of diffusers."""
