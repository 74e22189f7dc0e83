"""Evaluation of a pretrained model without fine-tuning."""
