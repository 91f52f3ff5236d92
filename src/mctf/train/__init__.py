"""Fine-tuning fused models: the loss for anyone's own loop (`consistency`), and an engine that runs a recipe."""
