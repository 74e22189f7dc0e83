"""Samples shuffled in windows of shards: each once per epoch, from few shards at a time, the same on any node."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hashed_batches import config_of, sequence_hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from many_shards import prepare_many_shards
from pydantic import ValidationError
from sample_order import samples_of_step

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import SampleIndex, build_indexes
from multihop.pretrain.data.loader import prefetch_batches
from multihop.pretrain.data.order import MIXTURE_BLOCK, draw_sources, next_positions, quotas
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.data.shard_requests import clear_requests, request_shards, requested_shards
from multihop.pretrain.data.shard_windows import ShardWindows, shards_of_index
from multihop.pretrain.objectives import clm
from multihop.pretrain.objectives.config import ObjectiveConfig

WINDOWED = ["mlm", "mlm+sop", "clm", "mlm isolated", "clm isolated"]
PHASES = [
    {"seq_len": 20, "global_batch_size": 20, "steps": 110, "batch_ramp": [{"steps": 2, "global_batch_size": 2}]},
    {"seq_len": 33, "global_batch_size": 10, "steps": 30},
]
DRAWN = [[13, 10, 14, 9, 11, 12], [5, 7, 4, 6, 8, 0], [2, 1, 3, 0, 1, 2]]
"""Samples of the first three steps of 6 samples each, from windows of two of five shards."""
Sizes = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


@given(sizes=Sizes, together=st.integers(1, 5), key=st.integers(0, 2**64 - 1), data=st.data())
def test_an_epoch_has_each_sample_once_from_so_many_shards_at_a_time(
    sizes: list[int], together: int, key: int, data: st.DataObject
) -> None:
    windows = ShardWindows(np.cumsum([0, *sizes]), together)
    every = np.arange(sum(sizes))
    found = windows.samples(every, key)
    assert sorted(found) == every.tolist()
    shards = np.searchsorted(windows.first_samples, found, side="right") - 1
    left, position = set(range(len(sizes))), 0
    while position < len(every):
        these, end = windows.shards(every[position : position + 1], key)
        assert len(these) <= together and these <= left and set(shards[position:end]) <= these
        left, position = left - these, end
    assert sum(sizes[shard] for shard in left) == 0
    some = np.array(sorted(data.draw(st.sets(st.integers(0, len(every) - 1), max_size=9))), np.int64)
    assert np.array_equal(windows.samples(some, key), found[some])


@settings(max_examples=30)
@given(
    weights=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=5),
    position=st.integers(0, 3000) | st.integers(MIXTURE_BLOCK - 50, MIXTURE_BLOCK + 50),
)
def test_what_a_source_draws_next_is_known_before_it_is_drawn(weights: list[float], position: int) -> None:
    quota = quotas(tuple(weights))
    sources, drawn = draw_sources(np.arange(position, position + MIXTURE_BLOCK), quota, "key")
    firsts = [int(drawn[sources == source][0]) for source in range(len(weights))]
    assert next_positions(position, quota, "key").tolist() == firsts


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=40),
    bounds=st.sets(st.integers(1, 39), max_size=8),
    skipped=st.integers(0, 3),
    seq_len=st.integers(1, 12),
)
def test_the_samples_of_each_shard_are_those_that_begin_in_it(
    lengths: list[int], bounds: set[int], skipped: int, seq_len: int
) -> None:
    """`skipped` documents of another source come before those of the index."""
    rows, objective = np.cumsum([0, *lengths]), ObjectiveConfig(name="clm")
    starts = [0, *sorted(bound for bound in bounds if bound < skipped + len(lengths)), skipped + len(lengths)]
    index = SampleIndex(rows, skipped, skipped + len(lengths), clm.sample_count(rows, seq_len))
    found = shards_of_index(objective, index, starts, seq_len)
    documents = skipped + clm.sample_rows(rows, np.arange(index.size), seq_len)[:, 0]
    shard_of = np.searchsorted(starts, documents, side="right") - 1
    shards = len(found.first_samples) - 1
    assert found.first == np.searchsorted(starts, skipped, side="right") - 1 and shards == len(starts) - 1 - found.first
    for shard in range(shards):
        first, stop = found.first_samples[shard : shard + 2].tolist()
        assert np.flatnonzero(shard_of == found.first + shard).tolist() == list(range(first, stop))
        last = found.first + int(found.last_read[shard])
        assert last == (shard_of[stop] if stop < index.size else len(starts) - 2)


def test_what_was_ever_drawn_is_drawn_again() -> None:
    """A run that is resumed with a newer version must get the samples of the version that began it."""
    config = config_of("clm", [{"seq_len": 20, "steps": 100, "global_batch_size": 6}])
    windows = [[ShardWindows(np.array([0, 4, 4, 9, 11, 15]), 2)]]
    drawn = [samples_of_step(1, "data", config.phases, [[15]], step, None, windows) for step in range(3)]
    assert [each.samples.tolist() for each in drawn] == DRAWN
    assert [each.epochs.tolist() for each in drawn] == [[0] * 6, [0] * 6, [0] * 3 + [1] * 3]


@pytest.fixture(scope="module")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that prepares three sources in many small shards for an objective, once for each tokenizer."""
    folder = tmp_path_factory.mktemp("sharded")
    sources = [f"{texts}/{names}.txt" for names in ("00[0-4]?", "00[5-9]?", "01??")]

    def prepared(objective: str) -> Path:
        special = "gpt2" if objective.startswith("clm") else "bert"
        if not (folder / special).exists():
            prepare_many_shards(
                DataConfig(sources=[Source(path=path) for path in sources], heldout_fraction=0.2),
                TokenizerConfig.model_validate({"vocab_size": 90, "special_tokens": special}),
                folder / special,
            )
        return folder / special

    return prepared


def windowed(objective: str, weights: tuple[float, ...] | None, together: int = 2) -> TrainingConfig:
    config = config_of(objective, PHASES, weights)
    assert config.data is not None
    return config.model_copy(update={"data": config.data.model_copy(update={"shuffle_window_shards": together})})


@contextmanager
def fetching(run_dir: Path, whole: Path, copy: Path) -> Iterator[list[str]]:
    """Fetch the requested shards into `copy` one by one and remove others; yields the names of what was fetched."""
    ended, fetched = threading.Event(), list[str]()

    def work() -> None:
        while not ended.wait(0.002):
            for name in (wanted := requested_shards(run_dir)):
                if not (copy / name).exists():
                    shutil.copy(whole / name, copy / f".{name}")
                    (copy / f".{name}").rename(copy / name)
                    fetched.append(name)
                    break
            for path in copy.glob("train-*") if wanted else ():
                if path.name not in wanted:
                    path.unlink()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield fetched
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("objective", "weights"),
    [*((each, None) for each in WINDOWED), ("mlm", (1.0, 2.0, 4.0)), ("clm", (0.02, 2.0, 4.0))],
)
def test_a_node_with_some_shards_makes_the_batches_of_one_with_all(
    objective: str, weights: Any, data: Callable[[str], Path], tmp_path: Path
) -> None:
    config, whole, copy = windowed(objective, weights), data(objective), tmp_path / "copy"
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("train-*"))
    build_indexes(tmp_path / "index", open_dataset(whole), config)
    alone = BatchBuilder.open(config, whole, tmp_path / "index", 0, 1, [100, 100])
    shards = len(alone.data.manifest.of_split("train"))
    assert shards > 20
    expected = [sequence_hashes(alone.step(step)) for step in range(total_steps(config.phases))]
    at_once: list[int] = []

    def builder() -> BatchBuilder:
        return BatchBuilder.open(config, copy, tmp_path / "index", 0, 1, [100, 100], shard_request_dir=tmp_path)

    with fetching(tmp_path, whole, copy) as fetched:
        found: list[list[str]] = []
        for share in prefetch_batches(builder(), range(total_steps(config.phases)), 0):
            found.append(sequence_hashes(share))
            at_once.append(len(list(copy.glob("train-*"))))
        assert found == expected
        assert len(fetched) > shards
        if weights is None:
            assert max(at_once) < 2 * shards / 3
        # Resumed somewhere, with a process that makes batches ahead.
        clear_requests(tmp_path)
        assert [sequence_hashes(share) for share in prefetch_batches(builder(), range(33, 50), 1)] == expected[33:50]


@pytest.mark.parametrize("objective", WINDOWED)
def test_an_epoch_of_a_data_set_has_each_sample_once(
    objective: str, data: Callable[[str], Path], tmp_path: Path
) -> None:
    config = windowed(objective, None)
    build_indexes(tmp_path, open_dataset(data(objective)), config)
    builder = BatchBuilder.open(config, data(objective), tmp_path, 0, 1, [100, 100])
    chosen = [builder.order.samples_of_step(step) for step in range(110)]
    samples, epochs = (np.concatenate([getattr(each, name) for each in chosen]) for name in ("samples", "epochs"))
    size = builder.order.indexes[0][0].size
    assert epochs.max() >= 2 and (np.bincount(samples[epochs == 0], minlength=size) == 1).all()
    assert (samples[epochs == 0] != samples[epochs == 1]).any()
    assert not np.array_equal(samples, np.concatenate([_without(config, builder, step) for step in range(110)]))


def _without(config: TrainingConfig, builder: BatchBuilder, step: int) -> Any:
    fingerprint = builder.data.manifest.fingerprint
    sizes = [builder.order.stream(phase).sizes for phase in range(len(PHASES))]
    return samples_of_step(config.seed, fingerprint, config.phases, sizes, step).samples


def test_requests_are_what_was_asked_last(tmp_path: Path) -> None:
    assert requested_shards(tmp_path) == []
    request_shards(tmp_path, ["b", "a"])
    assert requested_shards(tmp_path) == ["b", "a"]
    clear_requests(tmp_path)
    assert requested_shards(tmp_path) == []


def test_a_request_that_could_not_be_written_is_repeated(data: Callable[[str], Path], tmp_path: Path) -> None:
    config, run_dir = windowed("clm", None), tmp_path / "run"
    build_indexes(tmp_path / "index", open_dataset(data("clm")), config)
    builder = BatchBuilder.open(config, data("clm"), tmp_path / "index", 0, 1, [100, 100], shard_request_dir=run_dir)
    with pytest.raises(FileNotFoundError):  # as where the disk is full
        builder.request_shards(0)
    run_dir.mkdir()
    builder.request_shards(0)
    assert requested_shards(run_dir)


@pytest.mark.parametrize(
    ("objective", "why"), [("mlm+nsp", "draws second segments"), ("translation", "sorts all pairs")]
)
def test_objectives_that_read_everywhere_are_refused(objective: str, why: str) -> None:
    described = config_of(objective, [{"seq_len": 20, "steps": 3}]).model_dump()
    described["data"]["shuffle_window_shards"] = 4
    with pytest.raises(ValidationError, match=rf"data.shuffle_window_shards=4 reads some shards at a time.* {why}"):
        TrainingConfig.model_validate(described)
