"""Readers of official files. Nothing in this room imports torch: recipes are validated with it."""
