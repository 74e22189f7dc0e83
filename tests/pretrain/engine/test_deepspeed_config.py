"""The ds_config.json beside a recipe."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.deepspeed_config import KEYS, fill_deepspeed_config, read_deepspeed_config

CONFIG = TrainingConfig.model_validate(
    {"model": {"preset": "bert-tiny"}, "phases": [{"steps": 1}], "engine": {"zero_stage": 2, "micro_batch_size": 8}}
)


def nested(path: str, value: object) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b"."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_auto_and_absent_keys_are_filled_in_and_the_rest_is_kept() -> None:
    given = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000}, "gradient_clipping": "auto"}
    filled = fill_deepspeed_config(given, CONFIG, 8)
    assert filled["zero_optimization"] | {"stage": 2, "reduce_bucket_size": 1000} == filled["zero_optimization"]
    assert filled["gradient_clipping"] == 1.0 and filled["train_micro_batch_size_per_gpu"] == 8
    assert filled["bf16"]["enabled"] is False and "offload_optimizer" not in filled["zero_optimization"]
    assert given["zero_optimization"]["stage"] == "auto"


def test_offload_is_said_to_deepspeed_and_its_own_adam_is_not_used() -> None:
    engine = CONFIG.engine.model_copy(update={"zero_stage": 3, "offload": "optimizer+weights"})
    given = {"zero_optimization": {"offload_param": {"device": "auto", "pin_memory": True}}}
    filled = fill_deepspeed_config(given, CONFIG.model_copy(update={"engine": engine}), 8)
    assert filled["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert filled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert filled["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage=1 contradicts the recipe, which says 2"),
        ({"train_micro_batch_size_per_gpu": 4}, "contradicts the recipe, which says 8"),
        ({"optimizer": {"type": "Adam"}}, "optimizer=.* cannot be set here"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "moves the fp32 weights"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=true contradicts the recipe, which says false"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients=true contradicts"),
        ({"bf16": {"check_grad_overflow": False}}, "check_grad_overflow=false contradicts"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'device="nvme" contradicts the recipe'),
    ],
)
def test_contradictions_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        fill_deepspeed_config(given, CONFIG, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wandb", {"enabled": True, "api_key": "hunter2"}),
        ("comet", {"enabled": True, "api_key": "hunter2"}),
        ("tensorboard", {"enabled": True, "output_path": "/tmp/hunter2"}),
        ("csv_monitor", {"enabled": True, "output_path": "/tmp/hunter2"}),
        ("flops_profiler", {"enabled": True, "output_file": "/tmp/hunter2"}),
        ("comms_logger", {"enabled": True}),
        ("aio", {"block_size": 1}),
        ("nebula", {"enabled": True, "persistent_storage_path": "/tmp/hunter2"}),
        ("checkpoint", {"use_node_local_storage": True}),
        ("compression_training", {}),
        ("hybrid_engine", {"enabled": True}),
        ("autotuning", {"enabled": True, "results_dir": "/tmp/hunter2"}),
        ("elasticity", {"enabled": True}),
        ("torch_autocast", {"enabled": True, "dtype": "float16"}),
        ("bfloat16", {"enabled": True}),
        ("a" * 100 + "hunter2" * 1000, 1),
        ("zero_optimization.zenflow", {}),
        ("zero_optimization.leaf_module", {"classes": ["os.system"]}),
        ("zero_optimization.zero_quantized_gradients", True),
        ("zero_optimization.reduce_bucketsize", 1),
        ("zero_optimization.offload_optimizer.nvme_path", "/tmp/hunter2"),
        ("bf16.bf16_master_weights_and_grads", True),
        ("bf16.immediate_grad_update", True),
        ("zero_optimization.allgather_partitions", True),
        ("zero_optimization.stage3_module_granularity_threshold", 1000),
        ("fp16.auto_cast", True),
    ],
)
def test_only_what_is_known_to_be_harmless_is_passed_on(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{key[:100]} is not a key that multihop passes .*; allowed here: ") as failed:
        fill_deepspeed_config(nested(key, value), CONFIG, 8)
    assert "hunter2" not in str(failed.value)


@pytest.mark.parametrize("value", ["lots of hunter2", [1], {"a": 1}, math.inf, math.nan, True, 0, -1, 1.5])
def test_values_of_the_wrong_kind_are_refused(value: object) -> None:
    with pytest.raises(UserError, match="reduce_bucket_size must be a whole number above 0") as failed:
        fill_deepspeed_config({"zero_optimization": {"reduce_bucket_size": value}}, CONFIG, 8)
    assert "hunter2" not in str(failed.value)


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [
        (1, "zero_optimization.overlap_comm", True),
        (0, "zero_optimization.contiguous_gradients", True),
        (3, "zero_optimization.reduce_scatter", True),
        (2, "zero_optimization.sub_group_size", 1000),
    ],
)
def test_what_would_have_no_effect_is_refused(stage: int, key: str, value: object) -> None:
    config = CONFIG.model_copy(update={"engine": CONFIG.engine.model_copy(update={"zero_stage": stage})})
    with pytest.raises(UserError, match=f"{key}={json.dumps(value)} has no effect with engine.zero_stage={stage}"):
        fill_deepspeed_config(nested(key, value), config, 8)
    for unset in (False, None, "auto"):
        if value is True or unset is not False:
            fill_deepspeed_config(nested(key, unset), config, 8)


@pytest.mark.parametrize(
    "key",
    [
        "fp16.initial_scale_power",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.stage3_prefetch_bucket_size",
    ],
)
def test_a_key_whose_name_shows_when_it_applies_is_allowed_in_every_stage(key: str) -> None:
    fill_deepspeed_config(nested(key, key.endswith("pin_memory") or 12), CONFIG, 8)


def test_unset_keys_are_not_passed_on() -> None:
    """DeepSpeed would divide by a "steps_per_print" of "auto", and take its default for "reduce_bucket_size"."""
    given = {"steps_per_print": "auto", "zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": None}}
    filled = fill_deepspeed_config(given, CONFIG, 8)
    assert "steps_per_print" not in filled
    assert not {"reduce_bucket_size", "overlap_comm"} & filled["zero_optimization"].keys()


@pytest.mark.parametrize("section", ["zero_optimization", "bf16", "fp16"])
@pytest.mark.parametrize("value", [None, True, 1, "x", []])
def test_a_section_is_one(section: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{section} must be an object; write"):
        fill_deepspeed_config({section: value}, CONFIG, 8)


def test_all_that_is_passed_on_is_known_to_deepspeed() -> None:
    """A key that the installed version does not have would be a mistake of ours."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
        "zero_optimization.": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
    }
    for section, model in models.items():
        known = {path.removeprefix(section) for path in KEYS if path.startswith(section)}
        known = {name for name in known if "." not in name}
        assert known and known <= {field.alias or name for name, field in model.model_fields.items()}


def test_the_projects_own_file_suits_the_defaults() -> None:
    given = read_deepspeed_config(Path(__file__).parents[3] / "ds_config.json")
    assert fill_deepspeed_config(given, CONFIG, 8)["zero_optimization"]["stage"] == 2


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_deepspeed_config(tmp_path / "none.json")
    for content in ("{", "[" * 100_000, '{"a": 1, "a": 2}'):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match=r"broken\.json is not valid JSON"):
            read_deepspeed_config(tmp_path / "broken.json")
    (tmp_path / "long.json").write_text(" " * 2**20 + "{}")
    with pytest.raises(UserError, match="is longer than"):
        read_deepspeed_config(tmp_path / "long.json")
    with pytest.raises(UserError, match="is a directory; give the path of a DeepSpeed configuration"):
        read_deepspeed_config(tmp_path)
