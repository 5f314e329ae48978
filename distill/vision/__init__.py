"""Fine-tuning of transformers' vision models with AVQ, or with another efficient attention."""
