"""Answers that are spans of a text: SQuAD 1.1 and 2.0."""
