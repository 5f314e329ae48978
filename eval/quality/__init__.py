"""Quality of images: methods, metrics and protocols."""
