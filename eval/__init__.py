"""Downstream tasks: readers, heads, fine-tuning of one trial, metrics, zero-shot, the report."""
