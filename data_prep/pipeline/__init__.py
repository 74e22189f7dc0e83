"""Prepares a data set from a recipe's sources, stage by stage."""
