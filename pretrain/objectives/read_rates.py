"""How fast samples are read and collated into batches, by objective."""

from multihop.pretrain.objectives.config import ObjectiveConfig

_READ_TOKENS_PER_S = {
    "mlm+nsp": 7.1e6,
    "mlm+sop": 5.3e6,
    "mlm": 8.6e6,
    "plm": 2.1e6,
    "clm": 7.8e6,
    "bilm": 3.6e6,
    "translation": 5.7e6,
    "completion": 5.4e6,
    "ctc": 5.7e6,
}
"""Tokens that a process collates into batches in a second of CPU time, by objective: the lower of the medians at 128
and at 512 tokens, from files in the page cache (2026-11-29, an Intel Xeon with AVX-512 and other load,
`python bench/read_batches.py`); CTC's was not measured, but is made as that of translation."""
_READ_UNITS_PER_S = 2.2e6
"""The same with whole words, spans or n-grams masked: the lowest median of the three."""


def read_tokens_per_s(objective: ObjectiveConfig) -> float:
    """Tokens per second that a process on one CPU core collates into batches."""
    rate = _READ_TOKENS_PER_S[objective.name]
    is_by_units = "masking" in objective.needs.keys and objective.masking != "tokens"
    return min(rate, _READ_UNITS_PER_S) if is_by_units else rate
