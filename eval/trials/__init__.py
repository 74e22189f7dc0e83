"""Trials: what a recipe's evaluation consists of, in which order it runs, and the row of each trial."""
