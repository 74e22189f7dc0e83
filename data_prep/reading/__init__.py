"""Lists input files, local and remote, and reads documents from their formats."""
