"""Tokenizers, trained here or elsewhere."""
