"""Trying a model: fill in masks, continue prompts, embed texts."""
