"""Fine-tuning of fused models: the loss for any training loop (`consistency`), and an engine that runs a recipe."""
