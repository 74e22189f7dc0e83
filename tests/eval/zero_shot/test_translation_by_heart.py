"""A translation model memorizes 100 pairs, from the texts to BLEU; if it does not, some part is broken."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_pairs import TOKENS, pair, recipe, write_jsonl

from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.rules.pairs import join_sides
from multihop.data_prep.stages.documents import content_hash
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.tasks.task import Example, Task
from multihop.eval.zero_shot.translation import evaluate_translation
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.optim.schedule import learning_rate

PAIRS = [pair(number) for number in range(120)]


@pytest.mark.parametrize(
    ("family", "steps", "lr"),
    [
        pytest.param(
            {"family": "transformer", "layers": 2, "hidden": 64, "heads": 4, "max_positions": 128},
            450,
            3e-3,
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"family": "seq2seq", "layers": 1, "hidden": 128, "max_positions": 128},
            1500,
            1e-2,
            marks=[pytest.mark.long, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_they_are_learned(family: dict[str, Any], steps: int, lr: float, tmp_path: Path) -> None:
    data = tmp_path / "set"
    prepare(recipe(write_jsonl(tmp_path / "pairs.jsonl", PAIRS)), TOKENS, data)
    sizes = {"seq_len": 128, "global_batch_tokens": 1000, "steps": steps}
    phase = {**sizes, "lr": lr, "schedule": "linear", "warmup_ratio": 0.1}
    config = TrainingConfig.model_validate(
        {"model": {**family, "dropout": 0.0}, "phases": [phase], "objective": {"label_smoothing": 0.0}}
    )
    build_indexes(tmp_path / "index", open_dataset(data), config)
    builder = BatchBuilder.open(config, data, tmp_path / "index", 0, 1, [1])
    info = builder.data.manifest.tokenizer
    model = build_model(config.model, info.vocab_size)
    init_weights(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.phases, step)
        (batch,) = builder.step(step).micro_batches
        loss = model(**to_device(batch.inputs, torch.device("cpu")))["translation"] / batch.counts["translation"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    trained = TrainedModel("the model", model.eval(), load(data / info.file), info.special_ids)
    ids = set(builder.data.train.ids.tolist())
    learned = [each for each in PAIRS if content_hash(join_sides(*each))[0] in ids]
    assert len(learned) == len(ids) > 100
    task = Task(
        name="by-heart",
        kind="translation",
        metric="BLEU",
        higher_is_better=True,
        source="",
        test=tuple(Example(each) for each in learned),
        settings={"beams": 4, "length_penalty": 0.6},
    )
    row, predictions = evaluate_translation(trained, task)
    assert len(predictions["predicted"]) == len(learned)
    assert row["value"] > 90 > 5 > row["other_metrics"]["BLEU of the source"]
    # What the pairs were cleaned of before training is no difference between a translation and its reference.
    dirty = tuple(Example((f" {source}\t", target.replace(" ", "  \ufeff"))) for source, target in learned)
    assert evaluate_translation(trained, replace(task, test=dirty)) == (row, predictions)
