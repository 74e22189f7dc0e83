"""Recipes of tiny runs, one for each objective."""

from typing import Any

from kinds_of_families import TRAINED_WITH, model_section

from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import OBJECTIVES as NEEDS

STEPS = 6
SIZES = {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 64}


def recipe(objective: str, **changes: Any) -> dict[str, Any]:
    """Return the recipe of a run that saves at each step; `engine__zero_stage=1` changes a key."""
    by_tokens = NEEDS[objective].reads_pairs
    family = TRAINED_WITH[objective]
    encoder = {"encoder": "transformer"} if FAMILIES[family].uses_ctc else {}
    samples = {"global_batch_tokens": 200} if by_tokens else {"global_batch_size": 7}
    per_pass = {"micro_batch_tokens": 60} if by_tokens else {"micro_batch_size": 2}
    content: dict[str, Any] = {
        "seed": 5,
        "model": model_section(family, **SIZES, **encoder, dropout=0.1),
        "objective": {"name": objective, "mem_len": 20 if "mem_len" in NEEDS[objective].keys else 0},
        "phases": [{"seq_len": 48, **samples, "steps": STEPS, "lr": 1e-2}],
        "optimizer": {"name": "lamb"},
        "engine": {"deepspeed": {}, "zero_stage": 1, **per_pass, "log_interval": 1, "heldout_samples": 4},
        "checkpoint": {"save_interval": 1, "keep": 99},
    }
    for path, value in changes.items():
        part = content
        *parents, last = path.split("__")
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
    return content
