"""The recurrent encoder-decoder (Sutskever et al. 2014), with attention (Bahdanau et al. 2015; Luong et al. 2015)."""
