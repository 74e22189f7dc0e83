"""ds_config.json beside the recipe."""

from pathlib import Path

import pytest

from pretrain.config import TrainingConfig
from pretrain.deepspeed_config import fill_deepspeed_config, read_deepspeed_config

CONFIG = TrainingConfig.model_validate(
    {"model": {"preset": "bert-tiny"}, "phases": [{"steps": 1}], "engine": {"zero_stage": 2, "micro_batch": 8}}
)


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
    with pytest.raises(ValueError, match=complaint):
        fill_deepspeed_config(given, CONFIG, 8)


def test_the_projects_own_file_suits_the_defaults() -> None:
    given = read_deepspeed_config(Path(__file__).parents[2] / "ds_config.json")
    assert fill_deepspeed_config(given, CONFIG, 8)["zero_optimization"]["stage"] == 2


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_deepspeed_config(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_deepspeed_config(tmp_path / "broken.json")
