"""A training run: the worker process and its loop."""
