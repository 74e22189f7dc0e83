"""Fine-tuning a pretrained model on a task, from encoded examples to predictions."""
