"""What becomes of one document: one spelling, its sentences, whether it is worth training on."""
