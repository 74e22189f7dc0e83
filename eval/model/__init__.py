"""The model that is judged: which one it is, and its weights."""
