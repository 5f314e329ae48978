"""ScaleCrafter, to combine with AVQ, and LinFusion, to compare with it."""
