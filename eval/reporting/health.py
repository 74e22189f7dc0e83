"""What the report says of a model's health."""

from typing import Any

from multihop.common.json_lines import Row
from multihop.eval.health import HEALTH
from multihop.eval.losses import by_step
from multihop.eval.reporting.pictures import side_by_side
from multihop.eval.reporting.render import TemplateContext

_MEANINGS = {
    "unigram_gain": "how far the held-out loss on tokens is below the unigram model's, as a share of that; 0: only "
    "token frequencies are learned",
    "hidden_cosine": "mean cosine between the last hidden states of different tokens; 1: all tokens look alike",
    "hidden_rank": "effective rank of these states, as a share of what it can be; near 0: they differ in few "
    "directions only, 1: in all alike",
    "attention_entropy": "entropy of the attention weights, as a share of uniform attention's; 1: every token gets the "
    "same weight, 0: one token gets all",
}
_NOTE = (
    "The last three are measured on a sixteenth of the held-out samples. A rank below 0.2 is called a collapse if, "
    "three times in a row, the cosine is above 0.5 or the gain below 0.02. A small model that learns may have a low "
    "rank, too."
)


def health_facts(rows: list[Row], summary: dict[str, Any]) -> TemplateContext:
    """What the templates show.

    Args:
        rows: of metrics.jsonl.
    """
    curves = {name: list(by_step(rows, name).items()) for name in HEALTH}
    panels = {name: points for name, points in curves.items() if points}
    return {
        "diagnosis": summary.get("diagnosis"),
        "health": [(name, f"{summary[name]:.3f}", _MEANINGS[name]) for name in HEALTH if summary.get(name) is not None],
        "health_note": _NOTE,
        "health_picture": side_by_side("health", "The numbers of the table by step", panels) if panels else None,
    }
