"""Finds exact copies, near duplicates, and documents that contain evaluation texts."""
