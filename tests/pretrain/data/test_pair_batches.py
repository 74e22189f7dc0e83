"""Batches by tokens: pairs do not depend on what runs the training, and each occurs once per epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_pairs import TOKENS, pair, write_jsonl
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.index import build_indexes

WEIGHTS = (1.0, 3.0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of pairs from two sources."""
    folder = tmp_path_factory.mktemp("mixed-pairs")
    paths = [write_jsonl(folder / f"{name}.jsonl", map(pair, numbers)) for name, numbers in
             (("a", range(200)), ("b", range(200, 260)))]  # fmt: skip
    sources = [{"path": str(path), "fields": {"source": "en", "target": "es"}} for path in paths]
    prepare(DataConfig.model_validate({"sources": sources, "heldout_fraction": 0.1}), TOKENS, folder / "set")
    return folder / "set"


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexes")


def config_of(phases: list[dict[str, Any]], weights: tuple[float, ...] | None, micro: int | None) -> TrainingConfig:
    fields = {"source": "en", "target": "es"}
    return TrainingConfig.model_validate(
        {
            "seed": 5,
            "data": {"sources": [{"path": "p", "fields": fields, "weight": weight} for weight in weights or [None]]},
            "model": {"family": "transformer", "layers": 1, "hidden": 8, "heads": 1, "max_positions": 256},
            "phases": phases,
            "engine": {"heldout_samples": 11, "micro_batch_tokens": micro},
        }
    )


def builder_of(config: TrainingConfig, data: Path, indexes: Path, rank: int = 0, ranks: int = 1) -> BatchBuilder:
    build_indexes(indexes, open_dataset(data), config)
    return BatchBuilder.open(config, data, indexes, rank, ranks, [1] * len(config.phases))


def pairs_of(step: RankBatch) -> list[tuple[bytes, bytes, bytes]]:
    """Return what the model gets of each pair: source, decoder's input and targets."""
    found = []
    for batch in step.micro_batches:
        if not batch.counts["translation"]:
            continue
        inputs: Any = batch.inputs
        source, target = inputs["source"], inputs["target"]
        sources = np.split(source.input_ids, source.cu_seqlens[1:-1])
        targets = [np.split(each, target.cu_seqlens[1:-1]) for each in (target.input_ids, inputs["labels"])]
        found += [tuple(part.tobytes() for part in each) for each in zip(sources, *targets, strict=True)]
        assert source.max_seqlen == max(map(len, sources)) and inputs["label_smoothing"] == 0.1
        assert batch.tokens == len(source.input_ids) + len(inputs["labels"])
    return found


PHASES = st.lists(
    st.fixed_dictionaries(
        {"seq_len": st.sampled_from([48, 96]), "steps": st.integers(1, 6)},
        optional={"global_batch_tokens": st.integers(96, 900)},
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=40)
@given(
    phases=PHASES,
    weights=st.sampled_from([None, WEIGHTS]),
    ranks=st.integers(1, 4),
    micro=st.one_of(st.none(), st.integers(96, 400)),
)
def test_every_way_to_run_gives_the_same_pairs(
    mixed: Path,
    indexes: Path,
    phases: list[dict[str, Any]],
    weights: tuple[float, ...] | None,
    ranks: int,
    micro: int | None,
) -> None:
    by_tokens = all("global_batch_tokens" in phase for phase in phases)
    config = config_of(phases, weights, micro if by_tokens else None)
    whole = config.model_copy(update={"engine": config.engine.model_copy(update={"micro_batch_tokens": None})})
    alone = builder_of(whole, mixed, indexes)
    together = [builder_of(config, mixed, indexes, rank, ranks) for rank in range(ranks)]
    used = 0
    for step in range(sum(phase["steps"] for phase in phases)):
        expected, shares = alone.step(step), [builder.step(step) for builder in together]
        assert [one for share in shares for one in pairs_of(share)] == pairs_of(expected)
        assert sum(share.counts["translation"] for share in shares) == expected.counts["translation"]
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert alone.order.samples_before(step) == used
        used += expected.batch_size
        for share in shares:
            for batch in share.micro_batches:
                inputs: Any = batch.inputs
                if micro is not None and by_tokens and batch.counts["translation"]:
                    assert max(len(inputs["source"].input_ids), len(inputs["labels"])) <= micro
    assert [builder.order.samples_before(step + 1) for builder in together] == [used] * ranks
    held = [one for builder in together for one in pairs_of(builder.heldout())]
    assert held == pairs_of(alone.heldout()) and len(held) == min(11, len(open_dataset(mixed).heldout))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_each_pair_is_used_once_an_epoch(mixed: Path, indexes: Path, weights: tuple[float, ...] | None) -> None:
    config = config_of([{"seq_len": 96, "global_batch_tokens": 300, "steps": 200}], weights, None)
    builder = builder_of(config, mixed, indexes)
    sizes = [index.size for index in builder.order.indexes[0]]
    assert sum(sizes) == len(open_dataset(mixed).train)
    chosen = [builder.order.samples_of_step(step) for step in range(200)]
    assert all(len(set(each.sources)) == len(set(each.epochs)) == 1 for each in chosen)
    for source, size in enumerate(sizes):
        by_epoch: dict[int, list[int]] = {}
        for each in chosen:
            if each.sources[0] == source:
                by_epoch.setdefault(int(each.epochs[0]), []).extend(each.samples.tolist())
        *whole, last = [by_epoch[epoch] for epoch in sorted(by_epoch)]
        first = sum(sizes[:source])
        assert len(whole) > 1 and all(sorted(epoch) == list(range(first, first + size)) for epoch in whole)
        assert len(set(last)) == len(last) and whole[0] != whole[1]
    rows = builder.order.indexes[0][0].rows
    for step in range(20):
        inputs: Any = builder.step(step).micro_batches[0].inputs
        assert max(len(inputs["source"].input_ids), len(inputs["labels"])) <= 300
    assert (np.diff(rows[:, 1:].max(1)) >= 0).all()


def test_a_pair_is_laid_out_as_the_model_reads_it(mixed: Path, indexes: Path) -> None:
    builder = builder_of(
        config_of([{"seq_len": 96, "global_batch_tokens": 300, "steps": 3}], None, None), mixed, indexes
    )
    data, special = builder.data.train, builder.data.manifest.tokenizer.special_ids
    chosen, step = builder.order.samples_of_step(1), builder.step(1)
    for sample, (source, read, predicted) in zip(chosen.samples.tolist(), pairs_of(step), strict=True):
        document = int(builder.order.indexes[0][0].rows[sample, 0])
        tokens, length = data.tokens(document).tolist(), int(data.source_lengths[document])
        assert np.frombuffer(source, np.int64).tolist() == [*tokens[:length], special["end"]]
        assert np.frombuffer(read, np.int64).tolist() == [special["pad"], *tokens[length:]]
        assert np.frombuffer(predicted, np.int64).tolist() == [*tokens[length:], special["end"]]


def test_longer_pairs_are_left_out_and_told(mixed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder = builder_of(
        config_of([{"seq_len": 40, "global_batch_tokens": 300, "steps": 3}], None, None), mixed, tmp_path
    )
    data = builder.data.train
    longest = np.maximum(data.source_lengths, data.lengths - data.source_lengths) + 1
    assert 0 < builder.order.indexes[0][0].size == (longest <= 40).sum() < len(data)
    assert f"{(longest > 40).sum()} of {len(data)} pairs have a side longer than phases[].seq_len=40" in caplog.text
    with pytest.raises(UserError, match="too few for one sample of 8"):
        builder_of(config_of([{"seq_len": 8, "global_batch_tokens": 300, "steps": 3}], None, None), mixed, tmp_path)


@pytest.mark.parametrize(
    ("phase", "engine", "told"),
    [
        (
            {"global_batch_tokens": 300, "global_batch_size": 7},
            {},
            "global_batch_tokens=300 makes steps by tokens, and global_batch_size=7 counts",
        ),
        (
            {"global_batch_tokens": 300, "lr_scaling": {"rule": "sqrt", "global_batch_size": 8}},
            {},
            "remove one of them",
        ),
        ({"global_batch_tokens": 64}, {}, "global_batch_tokens=64 has no room for a side of seq_len=96"),
        ({"global_batch_tokens": 300}, {"micro_batch_size": "auto"}, "engine.micro_batch_size=auto counts samples"),
        (
            {"global_batch_tokens": 300},
            {"micro_batch_tokens": 64},
            "engine.micro_batch_tokens=64 has no room for a side",
        ),
        ({}, {"micro_batch_tokens": 200}, "engine.micro_batch_tokens=200 has no effect on phases"),
    ],
)
def test_impossible_combinations(phase: dict[str, Any], engine: dict[str, Any], told: str) -> None:
    content = {
        "model": {"preset": "transformer-tiny"},
        "phases": [{"seq_len": 96, "steps": 3, **phase}],
        "engine": engine,
    }
    with pytest.raises(ValidationError) as error:
        TrainingConfig.model_validate(content)
    assert told in str(error.value)


def test_tokens_are_for_pairs_alone() -> None:
    with pytest.raises(
        ValidationError, match=r"global_batch_tokens=300 is for objective\.name=translation or .*, not clm"
    ):
        TrainingConfig.model_validate(
            {"model": {"preset": "gpt2"}, "phases": [{"global_batch_tokens": 300, "steps": 3}]}
        )
