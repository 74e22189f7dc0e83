"""Shared by all packages: files, JSON lines, config sections, storage, exit codes, mapping, keyed random numbers."""
