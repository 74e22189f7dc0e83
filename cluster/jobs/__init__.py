"""Runs as jobs of a Ray cluster: submit, follow, stop, fetch."""
