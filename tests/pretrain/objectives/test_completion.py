"""Completion: the source is read, the loss is on the target alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kinds_of_families import COMPLETING
from torch.nn import functional as F

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.objectives.batch import Batch

CPU = torch.device("cpu")


def config_of(family: str = "gpt2", **phase: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model": {
                "family": family, "layers": 2, "hidden": 32, "heads": 2, "max_positions": 128, "dropout": 0.0
            },
            "objective": {"name": "completion"},
            "phases": [{"seq_len": 128, "steps": 4, **phase}],
            "engine": {"heldout_samples": 9},
        }
    )  # fmt: skip


def builder_of(
    config: TrainingConfig, data: Path, indexes: Path, rank: int = 0, ranks: int = 1, micro: int = 4
) -> BatchBuilder:
    build_indexes(indexes, open_dataset(data), config)
    return BatchBuilder.open(config, data, indexes, rank, ranks, [micro])


def sequences_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Return of each pair: what the model reads, the positions that predict, and the labels there."""
    inputs: Any = batch.inputs
    bounds = inputs["packed"].cu_seqlens
    found = []
    for start, stop in pairwise(bounds):
        mine = (inputs["predicting_positions"] >= start) & (inputs["predicting_positions"] < stop)
        positions = inputs["predicting_positions"][mine] - start
        found.append(
            (inputs["packed"].input_ids[start:stop].tolist(), positions.tolist(), inputs["labels"][mine].tolist())
        )
    return found


def test_a_sample_is_the_source_and_predicts_the_target_and_its_end(completion_data: Path, tmp_path: Path) -> None:
    builder = builder_of(config_of(global_batch_size=40), completion_data, tmp_path)
    documents, end = builder.data.train, builder.data.manifest.tokenizer.special_ids["end"]
    expected = {}
    for number in range(len(documents)):
        tokens, source = documents.tokens(number).tolist(), int(documents.source_lengths[number])
        expected[(end, *tokens[:source], end, *tokens[source:])] = [*tokens[source:], end]
    seen = 0
    for batch in builder.step(1).micro_batches:
        assert batch.counts == {"completion": len(batch.targets)} and batch.tokens == len(
            batch.inputs["packed"].input_ids
        )  # type: ignore[union-attr]
        for read, positions, labels in sequences_of(batch):
            assert labels == expected[tuple(read)]
            # Each position predicts the token after it, the last one the end.
            assert [*read, end][positions[0] + 1 :] == labels
            assert positions == list(range(len(read) - len(labels), len(read)))
            seen += 1
    assert seen == 40


@pytest.mark.parametrize("phase", [{"global_batch_size": 13}, {"global_batch_tokens": 700}])
def test_the_samples_of_a_step_do_not_depend_on_the_ranks(
    phase: dict[str, int], completion_data: Path, tmp_path: Path
) -> None:
    config = config_of(**phase)

    def step(ranks: int, micro: int) -> list[Any]:
        builders = [builder_of(config, completion_data, tmp_path, rank, ranks, micro) for rank in range(ranks)]
        batches = [batch for builder in builders for batch in builder.step(2).micro_batches if batch.tokens]
        return [sequence for batch in batches for sequence in sequences_of(batch)]

    alone = step(1, 50)
    assert alone == step(3, 2) == step(2, 1)
    if "global_batch_tokens" in phase:
        assert len(alone) * max(len(read) for read, _, _ in alone) <= 700


def test_held_out_pairs_are_the_same_each_time(completion_data: Path, tmp_path: Path) -> None:
    builder = builder_of(config_of(global_batch_size=8), completion_data, tmp_path)
    first, second = builder.heldout(), builder.heldout()
    assert first.samples == 9
    assert [sequences_of(each) for each in first.micro_batches] == [sequences_of(each) for each in second.micro_batches]


@pytest.mark.parametrize("family", COMPLETING)
def test_the_loss_is_that_of_the_target_given_the_source(family: str, completion_data: Path, tmp_path: Path) -> None:
    config = config_of(family, global_batch_size=6)
    builder = builder_of(config, completion_data, tmp_path, micro=6)
    (batch,) = builder.step(0).micro_batches
    model = build_model(config.model, builder.data.manifest.tokenizer.vocab_size).double()
    init_weights(model, 3)
    loss = model(**to_device(batch.inputs, CPU))["completion"]
    by_hand = torch.zeros((), dtype=torch.float64)
    for read, positions, labels in sequences_of(batch):
        whole = {"packed": _alone(read)}
        logits = model.lm_head(model.encode(to_device(whole, CPU)["packed"]))
        by_hand = by_hand + F.cross_entropy(logits[positions], torch.tensor(labels), reduction="sum")
    torch.testing.assert_close(loss.double(), by_hand, rtol=1e-6, atol=0)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def _alone(read: list[int]) -> Any:
    from multihop.pretrain.packed_tokens import pack_sequences

    return pack_sequences([np.array(read)])


def test_pairs_that_are_too_long_are_left_out(
    completion_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = builder_of(config_of(seq_len=40, global_batch_size=4), completion_data, tmp_path)
    rows = builder.order.indexes[0][0].rows
    lengths = builder.data.train.lengths + 2
    assert 0 < len(rows) == (lengths <= 40).sum() < len(lengths)
    assert "have sequences longer than phases[].seq_len=40" in caplog.text
