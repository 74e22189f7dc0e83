"""Evaluation of a pretrained model without fine-tuning. Importing it imports no torch: that is left to `scoring`."""
