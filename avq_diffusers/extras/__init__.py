"""ScaleCrafter and LinFusion, which combine with AVQ or compare with it."""
