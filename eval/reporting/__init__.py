"""What the report shows of each task."""
