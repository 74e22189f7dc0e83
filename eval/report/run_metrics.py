"""The content of metrics.jsonl: names of fields, series by step, training time and its forecast, and a diagnosis.

The diagnosis detects plateaus and the collapse of representations. Its thresholds lie between values that were
measured on small models (docs/training/metrics.md). One value alone is no sign: a small GPT-2 that learns well has a
low rank.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from multihop.common.json_lines import Row
from multihop.pretrain.objectives.config import TOKEN_LOSSES

LOSS = "loss"
PAIR_LOSSES = ("nsp_loss", "sop_loss")
"""Losses on pairs of segments, of which a run has at most one."""
PARTS = (*TOKEN_LOSSES, *PAIR_LOSSES, "nsp_accuracy", "sop_accuracy")
REFERENCES = ("unigram_loss", "uniform_loss")
"""Reference losses, comparable to the loss of predicted tokens (`TOKEN_LOSSES`) on the held-out text."""
_REQUIRED_HEALTH = ("unigram_gain", "hidden_cosine", "hidden_rank")
HEALTH = (*_REQUIRED_HEALTH, "attention_entropy")
"""Fields of the held-out rows of metrics.jsonl, which summary.json and the report repeat; the last one only of models
whose attention can be captured."""

_BY_SOURCE = re.compile(r"source(\d+)/heldout_\w+_loss")
_FORECAST_AFTER = 0.1
"""The share of the steps after which the time of training is forecast."""
_EVALUATIONS = 3
"""Number of newest evaluations that must agree: every model passes the unigram loss, and some pass a collapse."""
_STEPS = 200
"""Steps over which the loss must not have fallen: models that learned well stayed on the plateau for fewer."""
_NO_GAIN, _STANDSTILL = 0.02, 0.01
_HIGH_COSINE, _LOW_RANK = 0.5, 0.2
_ADVICE = (
    "try a longer phases[].warmup_ratio, a half or a quarter of phases[].lr, a smaller phases[].global_batch_size with "
    "more steps, a second value of 0.98 in optimizer.betas, or for a masked model model.output_bias=unigram and "
    "model.attention_init=neighbors"
)


def heldout(name: str) -> str:
    """Return the name of a loss on the held-out text."""
    return f"heldout_{name}"


def by_step(rows: Iterable[Row], name: str) -> dict[int, float]:
    """Return one field by step. A restart repeats steps; the first row of a step counts."""
    values: dict[int, float] = {}
    for row in rows:
        if name in row:
            values.setdefault(row["step"], row[name])
    return dict(sorted(values.items()))


def losses_by_source(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """The held-out loss by step of each source, by its number in `data.sources`; empty for a run with one source."""
    names = {name: int(match[1]) for row in rows for name in row if (match := _BY_SOURCE.fullmatch(name))}
    return {source: by_step(rows, name) for name, source in sorted(names.items(), key=lambda item: item[1])}


def training_clock(rows: Sequence[Row]) -> tuple[list[int], list[int], list[float]]:
    """Steps, tokens and seconds of training until each logged step, from 0 on.

    The seconds are those of the training loop at the rates that were logged: without start-up, held-out losses, and
    pauses between starts. They are comparable between runs on one machine that nothing else used.
    """
    steps, tokens, seconds = [0], [0], [0.0]
    timed = [row for row in rows if "tokens" in row and (row.get("tokens_per_s") or 0) > 0]  # NaN is not greater
    rates, used = by_step(timed, "tokens_per_s"), by_step(timed, "tokens")
    for step, rate in rates.items():
        seconds.append(seconds[-1] + (used[step] - tokens[-1]) / rate)
        steps.append(step)
        tokens.append(int(used[step]))
    return steps, tokens, seconds


def at_steps(wanted: Sequence[int], steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return values at steps between logged ones, by linear interpolation."""
    return [float(value) for value in np.interp(wanted, steps, values)]


def forecast(rows: Sequence[Row], total_steps: int) -> tuple[int, float] | None:
    """The first logged step after a tenth of all steps, and the seconds of training forecast from it.

    The forecast assumes that every step takes as long as those did on average, by `training_clock`. It is None before
    that step.
    """
    steps, _, seconds = training_clock(rows)
    for step, elapsed in zip(steps[1:], seconds[1:], strict=True):
        if step >= _FORECAST_AFTER * total_steps:
            return step, elapsed / step * total_steps
    return None


def diagnosis(rows: Sequence[Row]) -> str | None:
    """Return one sentence if the model is on the plateau at the unigram loss or has collapsed; None if neither.

    The diagnosis is None while the learning rate is warmed up.

    Args:
        rows: rows of metrics.jsonl of any kind; the first row of a repeated step counts.
    """
    evaluated = {
        row["step"]: row for row in reversed(rows) if row["step"] > 0 and all(name in row for name in _REQUIRED_HEALTH)
    }
    steps = [step for step in sorted(evaluated) if step >= _warmed_up(rows)]
    if len(steps) < _EVALUATIONS:
        return None
    newest, findings = [evaluated[step] for step in steps[-_EVALUATIONS:]], list[str]()
    now = newest[-1]
    long_ago = [step for step in steps[: 1 - _EVALUATIONS] if step <= steps[-1] - _STEPS]
    if long_ago:
        gains = [evaluated[step]["unigram_gain"] for step in steps[steps.index(long_ago[-1]) :]]
        if max(gains) < _NO_GAIN and gains[-1] - gains[0] < _STANDSTILL:
            findings.append(
                f"the model sits on the plateau at the unigram loss: from step {long_ago[-1]:,} to step {now['step']:,}"
                f" its held-out loss went from {_beside(gains[0])} to {_beside(gains[-1])} that of a model which knows "
                "token frequencies alone"
            )
    if all(_collapsed(row) for row in newest):
        findings.append(
            f"its last hidden states have collapsed: at step {now['step']:,} the mean cosine between different tokens "
            f"is {now['hidden_cosine']:.2f}, and the effective rank {now['hidden_rank']:.0%} of what it can be"
        )
    if not findings:
        return None
    sentence = "; ".join([*findings, _ADVICE])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _collapsed(row: Row) -> bool:
    """Return whether the hidden states have collapsed.

    States that differ in few directions may still be opposite to one another: their mean cosine is then low.
    """
    alike = row["hidden_cosine"] > _HIGH_COSINE or row["unigram_gain"] < _NO_GAIN
    return bool(row["hidden_rank"] < _LOW_RANK and alike)


def _beside(gain: float) -> str:
    return f"{abs(gain):.1%} {'below' if gain > 0 else 'above'}"


def _warmed_up(rows: Sequence[Row]) -> int:
    """Return the first step after the newest warm-up of the learning rate; 0 if no row has a rate.

    A warm-up ends where the rate rises for the last time: every schedule falls or stays after it.
    """
    rates = {row["step"]: row["lr"] for row in reversed(rows) if "lr" in row}
    steps = sorted(rates)
    rises = [later for earlier, later in pairwise(steps) if rates[later] > rates[earlier]]
    return max(rises, default=0)
