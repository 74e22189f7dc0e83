"""What the pipeline's stages share: outputs that are written once, and the documents in them."""
