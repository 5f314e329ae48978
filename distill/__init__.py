"""Training: distillation of AVQ codebooks, and the pretraining of the embedded mini-sd model."""
