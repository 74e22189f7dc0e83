"""ds_config.json: what the recipe decides stands there as "auto" and is filled in; a contradiction is refused."""

import json
from pathlib import Path
from typing import Any, Literal

from pretrain.config import TrainingConfig

# Read by DeepSpeed, but decided elsewhere in a multihop run.
_REFUSED = {
    "optimizer": "the recipe's optimizer section sets it",
    "scheduler": "the recipe's phases set it",
    "train_batch_size": "the recipe's phases[].batch_size sets it",
    "gradient_accumulation_steps": "it follows from phases[].batch_size, engine.micro_batch and the number of ranks",
    "data_types": "it moves the fp32 weights to where checkpoints do not look for them",
    "activation_checkpointing": "the recipe's engine.activation_checkpointing sets it",
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


def fill_deepspeed_config(
    given: dict[str, Any], config: TrainingConfig, micro_batch: int | Literal["auto"]
) -> dict[str, Any]:
    """`given` with the recipe's values in place of "auto" and of what it leaves out.

    Args:
        micro_batch: samples a rank takes at once; "auto" as long as that is not known.

    Raises:
        ValueError: a key that the recipe decides has another value, or a key must not be set at all.
    """
    for path, reason in _REFUSED.items():
        value = _get(given, path)
        if value not in (None, "auto", False, {}):
            raise ValueError(f"ds_config: {path}={json.dumps(value)} cannot be set here: {reason}; remove it")
    offload = config.engine.offload
    decided = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization.stage": config.engine.zero_stage,
        "zero_optimization.offload_optimizer.device": "none" if offload == "none" else "cpu",
        "zero_optimization.offload_param.device": "cpu" if offload == "optimizer+weights" else "none",
        "bf16.enabled": config.engine.precision == "bf16",
        "fp16.enabled": config.engine.precision == "fp16",
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam recomputes its beta powers after loading and so is not bit-exact across a resume.
        "zero_force_ds_cpu_optimizer": False,
        # The map of slices knows one owner for each part of a weight, in the model's order.
        "zero_optimization.round_robin_gradients": False,
        "zero_optimization.zero_hpz_partition_size": 1,
        # A gradient that is not finite must never reach the weights.
        "bf16.check_grad_overflow": True,
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
    for section in ("offload_optimizer", "offload_param"):
        if filled["zero_optimization"][section]["device"] == "none":
            del filled["zero_optimization"][section]
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
