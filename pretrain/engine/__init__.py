"""DeepSpeed, and the processes that it runs on."""
