"""How a step's batch comes about."""
