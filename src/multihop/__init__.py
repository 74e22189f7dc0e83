"""Pretraining of language models: text to shards, training, evaluation, comparison."""
