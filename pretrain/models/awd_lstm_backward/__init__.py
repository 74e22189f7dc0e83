"""AWD-LSTM (Merity et al. 2018), the language model of ULMFiT (Howard and Ruder 2018)."""
