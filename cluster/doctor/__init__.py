"""Checks a cluster before a big job: `rounds` measures the nodes, and `findings` judges the report."""
