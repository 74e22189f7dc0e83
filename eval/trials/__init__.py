"""Trials: the plan of a recipe's evaluation, the order in which trials run, and the row of each trial."""
