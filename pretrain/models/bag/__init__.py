"""A bag of word vectors (Mikolov et al. 2013)."""
