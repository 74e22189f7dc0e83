"""The model families, a folder each, and what they share."""
