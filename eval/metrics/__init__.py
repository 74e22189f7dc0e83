"""Metrics by their official definitions, with the sums over examples that determine them."""
