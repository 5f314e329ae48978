"""Images and captions of a distillation, encoded and cached."""
