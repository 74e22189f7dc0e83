"""Bidirectional language models of two LSTM stacks: TagLM (Peters et al. 2017) and ELMo (Peters et al. 2018)."""
