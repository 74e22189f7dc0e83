"""Readers of the official files of labelled sets. Nothing here imports torch: recipes are validated with it."""
