"""All that imports Ray."""
