"""RoBERTa (Liu et al. 2019)."""
