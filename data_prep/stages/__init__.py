"""Shared parts of the pipeline's stages: outputs that are written once, their runners, and the documents in them."""
