"""ds_config.json: what the recipe decides stands there as "auto" and is filled in; a contradiction is refused."""

import json
from pathlib import Path
from typing import Any

from pretrain.config import TrainingConfig

# Read by DeepSpeed, but decided elsewhere in a multihop run, or known to break the map of slices.
_REFUSED = {
    "optimizer": "the recipe's optimizer section sets it",
    "scheduler": "the recipe's phases set it",
    "train_batch_size": "the recipe's phases[].batch_size sets it",
    "gradient_accumulation_steps": "it follows from phases[].batch_size, engine.micro_batch and the number of ranks",
    "fp16": "engine.precision knows fp32 and bf16",
    "zero_optimization.round_robin_gradients": "it reorders the parameters that checkpoints name",
    "zero_optimization.offload_optimizer": "offload is not supported",
    "zero_optimization.offload_param": "offload is not supported",
}


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"engine.deepspeed={path}: there is no such file; name a DeepSpeed configuration") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"engine.deepspeed={path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"engine.deepspeed={path} holds {type(content).__name__}, expected a JSON object")
    return content


def fill_deepspeed_config(given: dict[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """`given` with the recipe's values in place of "auto" and of what it leaves out.

    Raises:
        ValueError: a key that the recipe decides has another value, or a key must not be set at all.
    """
    for path, reason in _REFUSED.items():
        value = _get(given, path)
        if value not in (None, "auto", False, {"enabled": False}):
            raise ValueError(f"ds_config: {path}={json.dumps(value)} cannot be set here: {reason}; remove it")
    decided = {
        "train_micro_batch_size_per_gpu": config.engine.micro_batch,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization.stage": config.engine.zero_stage,
        "bf16.enabled": config.engine.precision == "bf16",
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
    }
    filled: dict[str, Any] = json.loads(json.dumps(given))
    for path in _REFUSED:
        _remove(filled, path)
    for path, value in decided.items():
        there = _get(given, path)
        if there not in (None, "auto", value):
            raise ValueError(
                f"ds_config: {path}={json.dumps(there)} contradicts the recipe, which says {json.dumps(value)}; "
                'write "auto" there or change the recipe'
            )
        *parents, last = path.split(".")
        part = filled
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
    return filled


def _get(tree: dict[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _remove(tree: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    part: Any = tree
    for parent in parents:
        part = part.get(parent, {})
    part.pop(last, None)
