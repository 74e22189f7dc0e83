"""Models, objectives, sample order, the DeepSpeed engine, the loop, checkpoints."""
