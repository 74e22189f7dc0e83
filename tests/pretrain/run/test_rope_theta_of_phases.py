"""Training, evaluation and export use the RoPE base of the phase (`phases[].global_rope_theta`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import refusal_at_start, run_worker
from rank_pool import RankPool
from worker_runs import checkpoint, recipe, rows

from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.phases import model_after
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.run.find_checkpoint import find_checkpoint

MODEL = {"family": "modernbert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, "local_attention": 16}
OTHER = 2.0


def heldout_loss(config: TrainingConfig, model_config: ModelConfig, run: Path, step: int) -> float:
    builder = BatchBuilder.open(config, run / "data", run / "index", 0, 1, [10, 10])
    model = build_model(model_config, builder.data.manifest.output_tokenizer.vocab_size)
    model.load_state_dict(load_weights(checkpoint(run, step)))
    total = count = 0.0
    with torch.no_grad():
        for batch in builder.heldout().micro_batches:
            total += float(model.eval()(**to_device(batch.inputs, torch.device("cpu")))["mlm"])
            count += batch.counts["mlm"]
    return total / count


@pytest.mark.ranks
def test_training_evaluation_and_export_have_the_base_of_the_phase(
    bert_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    phase = {"seq_len": 48, "global_batch_size": 10, "steps": 6, "lr": 2e-2, "schedule": "constant"}
    content = recipe(objective__name="mlm", phases=[phase, {**phase, "global_rope_theta": OTHER}], model=MODEL)
    content["checkpoint"]["save_interval"] = content["engine"]["eval_interval"] = 6
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "data").symlink_to(bert_data)
    (run / "recipe.json").write_text(json.dumps(content))
    assert pool(1).run(run_worker, run) == [0]

    config = TrainingConfig.model_validate(content)
    logged = {row["step"]: row["heldout_loss"] for row in rows(run) if "heldout_loss" in row}
    for step, theta in ((6, 160_000.0), (12, OTHER)):
        found = find_checkpoint(str(run), step)
        assert getattr(found.model, "global_rope_theta") == theta  # noqa: B009
        assert heldout_loss(config, found.model, run, step) == pytest.approx(logged[step], rel=1e-6)
        export_model(found.location, found.model, found.data.tokenizer.vocab_size, found.data.tokenizer.special_ids,
                     tmp_path / f"out-{step}")  # fmt: skip
        assert json.loads((tmp_path / f"out-{step}" / "config.json").read_text())["global_rope_theta"] == theta

    def refusal(**changes: Any) -> str:
        child = tmp_path / f"child-{len(list(tmp_path.iterdir()))}"
        (child / "logs").mkdir(parents=True)
        (child / "data").symlink_to(bert_data)
        model = {**MODEL, "init_from": str(run), "global_rope_theta": OTHER, **changes}
        (child / "recipe.json").write_text(json.dumps({**content, "phases": [phase], "model": model}))
        (said,) = pool(1).run(refusal_at_start, child)
        return str(said)

    assert refusal() == refusal(max_positions=128) == ""
    for key, value in (
        ("global_rope_theta", 160_000.0),
        ("local_rope_theta", 5.0),
        ("heads", 4),
        ("local_attention", 8),
    ):
        assert f", and this run {key}={value}; set the same values in model" in refusal(**{key: value}), key

    of_first = model_after(config.model, config.phases, 6)
    assert heldout_loss(config, of_first, run, 12) != pytest.approx(logged[12], rel=2e-6)


def test_a_run_that_has_not_begun_has_the_base_of_its_first_phase() -> None:
    config = TrainingConfig.model_validate(
        {"model": MODEL, "phases": [{"steps": 2, "seq_len": 8, "global_rope_theta": 3.0}, {"steps": 2, "seq_len": 8}]}
    )
    found = [getattr(model_after(config.model, config.phases, steps), "global_rope_theta") for steps in range(6)]  # noqa: B009
    assert found == [3.0, 3.0, 3.0, 160_000.0, 160_000.0, 160_000.0]
