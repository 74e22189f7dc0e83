"""The model under test: its description, and its weights."""
