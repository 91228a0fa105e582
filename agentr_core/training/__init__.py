"""Fine-tuning in a process of its own, with checkpoints that are published all at once."""
