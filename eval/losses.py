"""The names of a run's losses in metrics.jsonl and summary.json.

`loss` is the sum that is optimised; `mlm_loss`, `clm_loss`, `translation_loss`, `nsp_loss` and `sop_loss` are its
parts, all in nats;
`nsp_accuracy` and `sop_accuracy` belong to the pair losses. `heldout_` before a name: on the held-out text.
"""

from collections.abc import Iterable

from multihop.common.json_lines import Row

LOSS = "loss"
LANGUAGE_MODEL_LOSSES = ("mlm_loss", "clm_loss", "translation_loss")
"""A run has one of them. `unigram_loss` and `uniform_loss` are comparable to it, on the held-out text."""
PAIR_LOSSES = ("nsp_loss", "sop_loss")
"""A run has one of them at most."""
PARTS = (*LANGUAGE_MODEL_LOSSES, *PAIR_LOSSES, "nsp_accuracy", "sop_accuracy")
REFERENCES = ("unigram_loss", "uniform_loss")


def heldout(name: str) -> str:
    """The name of a loss on the held-out text."""
    return f"heldout_{name}"


def by_step(rows: Iterable[Row], name: str) -> dict[int, float]:
    """One loss by step. A restart repeats steps; the first row of a step counts."""
    values: dict[int, float] = {}
    for row in rows:
        if name in row:
            values.setdefault(row["step"], row[name])
    return dict(sorted(values.items()))
