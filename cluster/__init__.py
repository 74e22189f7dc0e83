"""The only package that knows Ray and MLflow: runs the other three, and is the command line."""
