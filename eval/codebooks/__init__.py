"""What codebooks learn: errors per layer, analyses, ablations, training curves."""
