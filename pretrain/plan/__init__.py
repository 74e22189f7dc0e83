"""What a run will take, before it starts: memory, time and cost."""
