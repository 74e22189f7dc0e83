"""The only package that imports MLflow."""
