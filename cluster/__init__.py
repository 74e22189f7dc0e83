"""Runs on clusters, and the command line. The only package that imports Ray (ray/) and MLflow (tracking/)."""
