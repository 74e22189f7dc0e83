"""Shared by all packages: files, JSON lines, config sections, storage, errors and exit codes, counter-based RNG."""
