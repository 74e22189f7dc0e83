"""Translations judged: BLEU and chrF by sacrebleu, on pairs that were not trained on."""
