"""Tokenizers: training, converting existing ones, encoding, and export."""
