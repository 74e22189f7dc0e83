"""What the families share."""
