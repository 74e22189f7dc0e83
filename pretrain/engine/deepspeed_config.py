"""ds_config.json: the recipe's values replace "auto" and fill in missing keys; a contradiction is refused."""

import json
import math
from pathlib import Path
from typing import Any, Literal

from common.user_file import read_given_text
from pretrain.config import TrainingConfig

# Keys of DeepSpeed that are set elsewhere in a multihop run.
_REFUSED = {
    "optimizer": "the recipe's optimizer section sets it",
    "scheduler": "the recipe's phases set it",
    "train_batch_size": "the recipe's phases[].batch_size sets it",
    "gradient_accumulation_steps": "it follows from phases[].batch_size, engine.micro_batch and the number of ranks",
    "data_types": "it moves the fp32 weights to where checkpoints do not look for them",
    "activation_checkpointing": "the recipe's engine.activation_checkpointing sets it",
}


# All keys that are passed on. Left out are keys that write files or send data elsewhere (monitors, profilers, NVMe),
# that name classes or code, or that change the computation by more than rounding.
_KNOWN = {
    "train_micro_batch_size_per_gpu": None,
    "gradient_clipping": None,
    "managed_gradient_accumulation": None,
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
    "steps_per_print": None,
    "wall_clock_breakdown": None,
    "memory_breakdown": None,
    "bf16": {"enabled": None, "check_grad_overflow": None, "immediate_grad_update": None},
    "fp16": {
        "enabled": None,
        "loss_scale": None,
        "initial_scale_power": None,
        "loss_scale_window": None,
        "hysteresis": None,
        "consecutive_hysteresis": None,
        "min_loss_scale": None,
    },
    "zero_optimization": {
        "stage": None,
        "offload_optimizer": {"device": None, "pin_memory": None},
        "offload_param": {"device": None, "pin_memory": None},
        "overlap_comm": None,
        "contiguous_gradients": None,
        "round_robin_gradients": None,
        "reduce_scatter": None,
        "reduce_bucket_size": None,
        "use_multi_rank_bucket_allreduce": None,
        "allgather_partitions": None,
        "allgather_bucket_size": None,
        "sub_group_size": None,
        "zero_hpz_partition_size": None,
        "stage3_prefetch_bucket_size": None,
        "stage3_param_persistence_threshold": None,
        "stage3_model_persistence_threshold": None,
        "stage3_max_live_parameters": None,
        "stage3_max_reuse_distance": None,
        "stage3_module_granularity_threshold": None,
        "stage3_use_all_reduce_for_fetch_params": None,
        "stage3_allgather_sequential": None,
    },
}
_WORDS = ("auto", "none", "cpu", "nvme")
"""The strings that a value may be: "auto", and devices."""


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ValueError: the file is missing or not a JSON object.
    """
    name = f"engine.deepspeed={path}"
    try:
        content = json.loads(
            read_given_text(path, name, "a DeepSpeed configuration"), object_pairs_hook=_without_doubles
        )
    except (ValueError, RecursionError) as error:
        if str(error).startswith(name):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds {type(content).__name__}, expected a JSON object")
    return content


def fill_deepspeed_config(
    given: dict[str, Any], config: TrainingConfig, micro_batch: int | Literal["auto"]
) -> dict[str, Any]:
    """`given` with the recipe's values in place of "auto" and of missing keys.

    Args:
        micro_batch: samples per micro-batch; "auto" while that is not known.

    Raises:
        ValueError: a key contradicts the recipe, must not be set, or is unknown.
    """
    for path, reason in _REFUSED.items():
        value = _get(given, path)
        if value not in (None, "auto", False, {}):
            raise ValueError(f"ds_config: {path}={json.dumps(value)} cannot be set here: {reason}; remove it")
    _check_known(given, _KNOWN)
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
        # pretrain.optim.slices expects one owner for each part of a weight, in the model's order.
        "zero_optimization.round_robin_gradients": False,
        "zero_optimization.zero_hpz_partition_size": 1,
        # Narrow gradients of many micro-batches are added up in fp32.
        "data_types.grad_accum_dtype": None if config.engine.precision == "fp32" else "fp32",
        # A non-finite gradient must never reach the weights.
        "bf16.check_grad_overflow": True,
        # DeepSpeed's throughput timer waits for the device twice a step.
        "timers.throughput.enabled": False,
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


def _check_known(given: dict[str, Any], known: dict[str, Any], section: str = "") -> None:
    """Refuse unknown keys by name, without their values, which may be secrets."""
    for key, value in given.items():
        path = f"{section}{key}"
        if path in _REFUSED:
            continue
        if key not in known:
            raise ValueError(
                f"ds_config: {path[:100]} is not a key that multihop passes on to DeepSpeed; remove it; allowed here: "
                f"{', '.join(known)}"
            )
        if known[key] is not None:
            if not isinstance(value, dict):
                raise ValueError(f"ds_config: {path} must be an object; write {{}} or leave it out")
            _check_known(value, known[key], f"{path}.")
        elif not (value is None or value in _WORDS or _is_finite(value)):
            raise ValueError(f'ds_config: {path} must be a finite number, true, false or "auto"; correct it')


def _is_finite(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return content


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
