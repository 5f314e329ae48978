"""Training: distillation of AVQ codebooks, the pretraining of the embedded models, their scenes."""
