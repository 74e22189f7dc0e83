"""ds_config.json: the recipe's values replace "auto" and missing keys, and contradictions are refused."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multihop.common.errors import UserError
from multihop.common.files import read_user_text
from multihop.pretrain.config import TrainingConfig

# DeepSpeed's keys that are set elsewhere in a multihop run, and where.
_REFUSED = {
    "optimizer": "the recipe's optimizer section sets it",
    "scheduler": "the recipe's phases set it",
    "train_batch_size": "the recipe's phases[].global_batch_size sets it",
    "gradient_accumulation_steps": (
        "it follows from phases[].global_batch_size, engine.micro_batch_size and the number of ranks"
    ),
    "data_types": "it moves the fp32 weights to where checkpoints do not look for them",
    "activation_checkpointing": "the recipe's engine.activation_checkpointing sets it",
}


@dataclass(frozen=True)
class ValueType:
    """The values that a key accepts."""

    description: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_integer(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()  # 5e8 is an integer


_FLAG = ValueType("true or false", lambda value: isinstance(value, bool))
_NUMBER = ValueType("a number, 0 or more", _is_number)
_SIZE = ValueType("a whole number, 0 or more", _is_integer)
_POWER = ValueType("a whole number from 0 to 126", lambda value: _is_integer(value) and value <= 126)
_COUNT = ValueType("a whole number above 0", lambda value: _is_integer(value) and value > 0)
_EVEN = ValueType("an even number above 0", lambda value: _is_integer(value) and value > 0 and value % 2 == 0)
_DEVICE = ValueType('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme"))
_ALWAYS = (0, 1, 2, 3)

KEYS: dict[str, tuple[ValueType, tuple[int, ...]]] = {
    "train_micro_batch_size_per_gpu": (_COUNT, _ALWAYS),
    "gradient_clipping": (_NUMBER, _ALWAYS),
    "managed_gradient_accumulation": (_FLAG, _ALWAYS),
    "zero_allow_untested_optimizer": (_FLAG, _ALWAYS),
    "zero_force_ds_cpu_optimizer": (_FLAG, _ALWAYS),
    "steps_per_print": (_COUNT, _ALWAYS),
    "wall_clock_breakdown": (_FLAG, _ALWAYS),
    "memory_breakdown": (_FLAG, _ALWAYS),
    "bf16.enabled": (_FLAG, _ALWAYS),
    "bf16.check_grad_overflow": (_FLAG, _ALWAYS),
    "fp16.enabled": (_FLAG, _ALWAYS),
    "fp16.loss_scale": (_NUMBER, _ALWAYS),
    "fp16.initial_scale_power": (_POWER, _ALWAYS),
    "fp16.loss_scale_window": (_COUNT, _ALWAYS),
    "fp16.hysteresis": (_COUNT, _ALWAYS),
    "fp16.consecutive_hysteresis": (_FLAG, _ALWAYS),
    "fp16.min_loss_scale": (_COUNT, _ALWAYS),
    "zero_optimization.stage": (_SIZE, _ALWAYS),
    "zero_optimization.offload_optimizer.device": (_DEVICE, _ALWAYS),
    "zero_optimization.offload_optimizer.pin_memory": (_FLAG, _ALWAYS),
    "zero_optimization.offload_param.device": (_DEVICE, _ALWAYS),
    "zero_optimization.offload_param.pin_memory": (_FLAG, _ALWAYS),
    "zero_optimization.overlap_comm": (_FLAG, (2, 3)),
    "zero_optimization.contiguous_gradients": (_FLAG, (1, 2, 3)),
    "zero_optimization.round_robin_gradients": (_FLAG, _ALWAYS),
    "zero_optimization.reduce_scatter": (_FLAG, (1, 2)),
    "zero_optimization.reduce_bucket_size": (_COUNT, (1, 2, 3)),
    "zero_optimization.use_multi_rank_bucket_allreduce": (_FLAG, (1, 2)),
    "zero_optimization.allgather_bucket_size": (_EVEN, (1, 2)),
    "zero_optimization.sub_group_size": (_COUNT, (3,)),
    "zero_optimization.zero_hpz_partition_size": (_COUNT, _ALWAYS),
    "zero_optimization.stage3_prefetch_bucket_size": (_SIZE, _ALWAYS),
    "zero_optimization.stage3_param_persistence_threshold": (_SIZE, _ALWAYS),
    "zero_optimization.stage3_model_persistence_threshold": (_SIZE, _ALWAYS),
    "zero_optimization.stage3_max_live_parameters": (_SIZE, _ALWAYS),
    "zero_optimization.stage3_max_reuse_distance": (_SIZE, _ALWAYS),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (_FLAG, _ALWAYS),
    "zero_optimization.stage3_allgather_sequential": (_FLAG, _ALWAYS),
}
"""The keys that are passed on, with the ZeRO stages in which each has an effect. A key whose section or name shows when
it applies is allowed in all stages, because it may stay in the file when the recipe chooses another setting. Not
allowed are keys that write files or send data elsewhere (monitors, profilers, NVMe), that name classes or code, that
change the computation by more than rounding (zero_optimization.stage3_module_granularity_threshold loses the gradients
of a model that it treats as one module), or that DeepSpeed reads and does not use
(zero_optimization.allgather_partitions; bf16.immediate_grad_update in the optimizers that are used here)."""
_UNSET = (None, "auto")


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        UserError: The file is missing or not a JSON object.
    """
    name = f"engine.deepspeed={path}"
    try:
        content = json.loads(
            read_user_text(path, name, "a DeepSpeed configuration"), object_pairs_hook=_reject_duplicate_keys
        )
    except (ValueError, RecursionError) as error:
        if str(error).startswith(name):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{name} is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} holds {type(content).__name__}, expected a JSON object")
    return content


def fill_deepspeed_config(
    content: dict[str, Any], config: TrainingConfig, micro_batch_size: int | Literal["auto"]
) -> dict[str, Any]:
    """`content` with the recipe's values instead of "auto" and of missing keys.

    Args:
        micro_batch_size: Samples per micro-batch; "auto" if it is not known yet.

    Raises:
        UserError: A key contradicts the recipe, must not be set, or is unknown.
    """
    for path, reason in _REFUSED.items():
        value = _get(content, path)
        if value not in (None, "auto", False, {}):
            raise UserError(f"ds_config: {path}={json.dumps(value)} cannot be set here: {reason}; remove it")
    _check_known(content, config.engine.zero_stage)
    offload = config.engine.offload
    required = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization.stage": config.engine.zero_stage,
        "zero_optimization.offload_optimizer.device": "none" if offload == "none" else "cpu",
        "zero_optimization.offload_param.device": "cpu" if offload == "optimizer+weights" else "none",
        "bf16.enabled": config.engine.precision == "bf16",
        "fp16.enabled": config.engine.precision == "fp16",
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam recomputes its beta powers after loading and so is not bit-exact across a resume.
        "zero_force_ds_cpu_optimizer": False,
        # `owned_slices` expects one owner per part of a weight, in the model's order.
        "zero_optimization.round_robin_gradients": False,
        "zero_optimization.zero_hpz_partition_size": 1,
        # Half-precision gradients are accumulated over micro-batches in fp32.
        "data_types.grad_accum_dtype": None if config.engine.precision == "fp32" else "fp32",
        # A non-finite gradient must never reach the weights.
        "bf16.check_grad_overflow": True,
        # DeepSpeed's throughput timer waits for the device twice per step.
        "timers.throughput.enabled": False,
    }
    filled = _without_unset(content)
    for path in _REFUSED:
        filled.pop(path, None)
    for path, value in required.items():
        present = _get(content, path)
        if present not in (None, "auto", value):
            raise UserError(
                f"ds_config: {path}={json.dumps(present)} contradicts the recipe, which says {json.dumps(value)}; "
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


def _check_known(content: dict[str, Any], zero_stage: int, section: str = "") -> None:
    """Refuse keys that are unknown or have no effect, and values of the wrong kind.

    Messages contain no values but numbers and booleans: others may be secrets.
    """
    paths = (path.removeprefix(section) for path in KEYS if path.startswith(section))
    known = dict.fromkeys(path.partition(".")[0] for path in paths)
    for key, value in content.items():
        path = f"{section}{key}"
        if path in _REFUSED:
            continue
        if key not in known:
            raise UserError(
                f"ds_config: {path[:100]} is not a key that multihop passes on to DeepSpeed; remove it; allowed here: "
                f"{', '.join(known)}"
            )
        if path not in KEYS:
            if not isinstance(value, dict):
                raise UserError(f"ds_config: {path} must be an object; write {{}} or leave it out")
            _check_known(value, zero_stage, f"{path}.")
        elif value not in _UNSET:
            value_type, stages = KEYS[path]
            if not value_type.accepts(value):
                raise UserError(f'ds_config: {path} must be {value_type.description}, or "auto"; correct it')
            if value and zero_stage not in stages:
                raise UserError(
                    f"ds_config: {path}={json.dumps(value)} has no effect with engine.zero_stage={zero_stage}; remove "
                    f"it, or set engine.zero_stage to {' or '.join(map(str, stages))}"
                )


def _without_unset(content: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keys that are null or "auto", which DeepSpeed does not accept everywhere."""
    return {
        key: _without_unset(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value not in _UNSET
    }


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return content


def _get(tree: dict[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value
