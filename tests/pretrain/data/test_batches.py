"""Samples, masks and segments do not depend on what runs the training, as hashes of each rank's batches show."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hashed_batches import Weights, config_of, sequence_hashes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds_of_families import TEXT_OBJECTIVES
from pydantic import ValidationError

from multihop.common.counter_rng import key_of
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.index import build_indexes, index_path, sources_of
from multihop.pretrain.data.loader import prefetch_batches
from multihop.pretrain.data.phases import is_skipped, samples_before, total_steps

OBJECTIVES = [*TEXT_OBJECTIVES, "mlm isolated", "clm isolated", "plm memory", "bilm memory"]
WEIGHTS: list[Weights] = [None, (1.0, 1.0, 1.0), (0.1, 2.0, 7.5)]
Data = Callable[[str], Path]


@pytest.fixture(scope="module")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Return a function that prepares three small sources for an objective, once for each tokenizer."""
    folder = tmp_path_factory.mktemp("mixed")
    sources = [f"{texts}/{names}.txt" for names in ("000[0-9]", "001[0-7]", "002[0-5]")]

    def prepared(objective: str) -> Path:
        pieces = "gpt2" if objective.startswith("clm") else "bert"
        if not (folder / pieces).exists():
            prepare(
                DataConfig(sources=[Source(path=path) for path in sources], heldout_fraction=0.2),
                TokenizerConfig.model_validate({"vocab_size": 90, "special_tokens": pieces}),
                folder / pieces,
            )
        return folder / pieces

    return prepared


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexes")


def together(ranks: list[RankBatch]) -> tuple[int, int, dict[str, int], list[str]]:
    """Merge the ranks' parts of one step; returns step, batch size, counts and hashes of the sequences."""
    (number,) = {part.step for part in ranks}
    (batch_size,) = {part.batch_size for part in ranks}
    assert len({len(part.micro_batches) for part in ranks}) == 1
    counts = {name: sum(part.counts[name] for part in ranks) for name in ranks[0].counts}
    counts["tokens"] = sum(part.tokens for part in ranks)
    assert sum(part.samples for part in ranks) == batch_size
    return number, batch_size, counts, [one for part in ranks for one in sequence_hashes(part)]


def reference(config: TrainingConfig, data: Path, indexes: Path) -> list[tuple[int, int, dict[str, int], list[str]]]:
    """Return every step on one rank, as one micro-batch, and the held-out samples, all made in this process."""
    build_indexes(indexes, open_dataset(data), config)
    alone = BatchBuilder.open(config, data, indexes, 0, 1, [10**6] * len(config.phases))
    steps = [step for step in range(total_steps(config.phases)) if not is_skipped(config.phases, step)]
    return [together([alone.step(step)]) for step in steps] + [together([alone.heldout()])]


def resumed(
    builder: Callable[[], BatchBuilder], starts: list[int], last: int, data_workers: int
) -> Iterator[RankBatch]:
    """Yield the batches of a rank that is restarted at each of `starts`."""
    for start, stop in zip(starts, [*starts[1:], last], strict=True):
        yield from prefetch_batches(builder(), range(start, stop), data_workers)


@st.composite
def phase_lists(draw: st.DrawFn) -> list[dict[str, typing.Any]]:
    phases, first = [], 0
    for _ in range(draw(st.integers(1, 2))):
        ramp = draw(
            st.lists(st.fixed_dictionaries({"steps": st.just(1), "global_batch_size": st.integers(1, 20)}), max_size=2)
        )
        steps = len(ramp) + draw(st.integers(1, 4))
        phases.append(
            {
                "seq_len": draw(st.sampled_from([12, 20, 33])),
                "global_batch_size": draw(st.integers(1, 40)),
                "steps": steps,
                "batch_ramp": ramp,
                "skip_steps": draw(st.lists(st.integers(first, first + steps - 1), max_size=1)),
            }
        )
        first += steps
    return phases


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    phases=phase_lists(),
    weights=st.sampled_from(WEIGHTS),
    world_size=st.integers(1, 4),
    micro_batch_sizes=st.lists(st.integers(1, 17), min_size=2, max_size=2),
    restarts=st.lists(st.integers(0, 12), max_size=3),
)
def test_every_way_to_run_gives_the_same_samples(
    objective: str,
    data: Data,
    indexes: Path,
    phases: list[dict[str, typing.Any]],
    weights: tuple[float, ...] | None,
    world_size: int,
    micro_batch_sizes: list[int],
    restarts: list[int],
) -> None:
    config, folder = config_of(objective, phases, weights), data(objective)
    expected = reference(config, folder, indexes)
    last = total_steps(config.phases)
    starts = [0, *sorted(start for start in restarts if start < last)]

    def builder(rank: int) -> BatchBuilder:
        return BatchBuilder.open(config, folder, indexes, rank, world_size, micro_batch_sizes[: len(phases)])

    seen = [list(resumed(lambda rank=rank: builder(rank), starts, last, 0)) for rank in range(world_size)]  # type: ignore[misc]
    found = [together(list(ranks)) for ranks in zip(*seen, strict=True)]
    assert [*found, together([builder(rank).heldout() for rank in range(world_size)])] == expected


PHASES: list[dict[str, typing.Any]] = [
    {
        "seq_len": 20,
        "global_batch_size": 7,
        "steps": 5,
        "batch_ramp": [{"steps": 2, "global_batch_size": 2}],
        "skip_steps": [3],
    },
    {"seq_len": 33, "global_batch_size": 10, "steps": 3},
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than cores
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("data_workers", [1, 3])
def test_processes_that_make_batches_ahead_change_nothing(
    objective: str, data_workers: int, data: Data, indexes: Path
) -> None:
    config, folder = config_of(objective, PHASES, WEIGHTS[2]), data(objective)
    expected = reference(config, folder, indexes)[:-1]

    def builder(rank: int) -> BatchBuilder:
        return BatchBuilder.open(config, folder, indexes, rank, 2, [2, 3])

    seen = [list(resumed(lambda rank=rank: builder(rank), [0, 4], 8, data_workers)) for rank in range(2)]  # type: ignore[misc]
    assert [together(list(ranks)) for ranks in zip(*seen, strict=True)] == expected
    first = seen[0][0].micro_batches[0].inputs["packed"].input_ids  # type: ignore[union-attr]
    assert type(first) is np.ndarray and first.dtype == np.int64 and first.flags.writeable


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_weighted_sources_stay_apart(objective: str, data: Data, indexes: Path) -> None:
    config = config_of(objective, [{"seq_len": 20, "global_batch_size": 400, "steps": 3}], WEIGHTS[2])
    folder = data(objective)
    reference(config, folder, indexes)
    builder = BatchBuilder.open(config, folder, indexes, 0, 1, [400])
    sizes = [index.size for index in builder.order.indexes[0]]
    chosen = builder.order.samples_of_step(0)
    share = np.bincount(chosen.sources, minlength=3) / 400
    assert np.abs(share - np.array(WEIGHTS[2]) / 9.6).max() < 0.08
    assert (np.searchsorted(np.cumsum(sizes), chosen.samples, side="right") == chosen.sources).all()
    assert chosen.epochs[chosen.sources == 2].max() > 2 > chosen.epochs[chosen.sources == 0].max()
    # Every source's index holds all its documents and only those.
    documents = open_dataset(folder).train
    firsts = [index.first_document for index in builder.order.indexes[0]]
    assert firsts == np.searchsorted(documents.sources, [0, 1, 2]).tolist()
    assert (np.diff(documents.sources.astype(int)) >= 0).all()
    for source, first in enumerate(firsts):
        start, part = documents.of_source(source)
        rows = range(start, start + len(part))
        assert start == first and (documents.sources[rows.start : rows.stop] == source).all()
        assert (part.ids == documents.ids[rows.start : rows.stop]).all() and set(part.sources) == {source}
        assert (part.lengths == documents.lengths[rows.start : rows.stop]).all()
        assert all((part.tokens(i) == documents.tokens(row)).all() for i, row in enumerate(rows))
        with pytest.raises(IndexError):
            part.tokens(len(part))
    assert sum((documents.sources == source).sum() for source in range(3)) == len(documents)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_held_out_samples_by_source_are_those_of_one_source_with_the_same_masks(
    objective: str, world_size: int, data: Data, indexes: Path
) -> None:
    config, folder = config_of(objective, PHASES[:1]), data(objective)
    reference(config, folder, indexes)
    builders = [BatchBuilder.open(config, folder, indexes, rank, world_size, [3]) for rank in range(world_size)]
    every = together([builder.heldout() for builder in builders])[3]
    by_source = [builder.heldout_by_source() for builder in builders]
    found = [one for source in (0, 1, 2) for one in together([shares[source] for shares in by_source])[3]]
    assert set(by_source[0]) == {0, 1, 2} and len(set(found)) == len(found) and set(found) <= set(every)
    assert len(found) == len(every) or objective != "mlm+sop", "its segments are of one document"


def masks_by_epoch(config: TrainingConfig, folder: Path, indexes: Path) -> dict[int, dict[int, str]]:
    """Return the hash of each masked sample in each epoch."""
    build_indexes(indexes, open_dataset(folder), config)
    builder = BatchBuilder.open(config, folder, indexes, 0, 1, [1])
    found: dict[int, dict[int, str]] = {}
    for step in range(config.phases[0].steps):
        chosen, made = builder.order.samples_of_step(step), builder.step(step)
        for sample, epoch, batch in zip(chosen.samples, chosen.epochs, made.micro_batches, strict=True):
            inputs: Any = batch.inputs
            digest = inputs["packed"].input_ids.tobytes() + inputs["masked_positions"].tobytes()
            found.setdefault(int(epoch), {})[int(sample)] = hashlib.sha256(digest).hexdigest()
    return found


@pytest.mark.parametrize("different", [None, 1, 3])
def test_masks_differ_by_epoch_or_come_back(different: int | None, data: Data, indexes: Path) -> None:
    folder = data("mlm")
    config = config_of("mlm", [{"seq_len": 60, "global_batch_size": 64, "steps": 12}], static_masks=different)
    epochs = masks_by_epoch(config, folder, indexes)
    assert len(epochs) > 5
    for one in epochs:
        for other in epochs:
            both = epochs[one].keys() & epochs[other].keys()
            same = sum(epochs[one][sample] == epochs[other][sample] for sample in both)
            comes_back = one == other if different is None else one % different == other % different
            assert same == len(both) if comes_back else same <= 0.01 * len(both)


def test_an_index_is_named_after_what_it_depends_on(data: Data, tmp_path: Path) -> None:
    mlm, clm = open_dataset(data("mlm")), open_dataset(data("clm"))

    def name(objective: str, **rules: typing.Any) -> str:
        held = clm if objective.startswith("clm") else mlm
        return index_path(tmp_path, held, "train", config_of(objective, PHASES, **rules).objective, 20).name

    # clm is cut at the same places whatever it isolates, and a memory changes no sample.
    assert len({name(objective) for objective in OBJECTIVES}) == len(OBJECTIVES) - 3
    assert name("clm") == name("clm isolated") and name("plm") == name("plm memory")
    assert name("mlm") == name("mlm", mask_rate=0.3, masking="spans", static_masks=2, max_predictions=3)
    for objective, held in (("mlm+nsp", mlm), ("clm", clm)):  # what they were when there were only these two
        key = key_of("index", held.manifest.fingerprint, "train", objective, 20)
        assert name(objective) == f"train-{objective}-20-{key:016x}.npy"


def test_without_weights_there_is_one_index_for_all() -> None:
    assert sources_of(config_of("clm", PHASES)) == [None]
    assert sources_of(config_of("clm", PHASES, WEIGHTS[1])) == [0, 1, 2]


def test_a_source_too_small_for_a_sample_is_named(data: Data, tmp_path: Path) -> None:
    config = config_of("clm", [{"seq_len": 20, "global_batch_size": 4, "steps": 3}], WEIGHTS[1])
    config = config.model_copy(update={"phases": [config.phases[0].model_copy(update={"seq_len": 10**5})]})
    with pytest.raises(UserError, match=r"train documents of data.sources\[0\] have \d+ tokens, too few"):
        build_indexes(tmp_path, open_dataset(data("clm")), config)


def test_a_source_without_weight_beside_one_with_is_refused() -> None:
    sources = [Source(path="a", weight=1.0), Source(path="b"), Source(path="c")]
    with pytest.raises(ValidationError, match=r"data.sources\[1\].weight is missing"):
        DataConfig(sources=sources)


def test_far_steps_are_streamed_at_once(data: Data, indexes: Path) -> None:
    far = {"seq_len": 20, "global_batch_size": 4, "steps": 2 * 10**9, "skip_steps": [10**9 + 1]}
    config, folder = config_of("clm", [far], WEIGHTS[1]), data("clm")
    build_indexes(indexes, open_dataset(folder), config)
    builder = BatchBuilder.open(config, folder, indexes, 0, 1, [2])
    for data_workers in (0, 1):
        coming = prefetch_batches(builder, range(10**9, 2 * 10**9), data_workers)
        assert [next(coming).step for _ in range(3)] == [10**9, 10**9 + 2, 10**9 + 3]
        del coming
    assert samples_before(config.phases, 2 * 10**9) == 8 * 10**9


@pytest.mark.parametrize("data_workers", [0, 1])
def test_a_fault_in_the_making_reaches_the_caller(data_workers: int, data: Data, indexes: Path) -> None:
    config, folder = config_of("clm", PHASES), data("clm")
    build_indexes(indexes, open_dataset(folder), config)
    builder = BatchBuilder.open(config, folder, indexes, 0, 1, [2, 2])
    wrong = dataclasses.replace(builder.order.indexes[0][0], first_document=10**6)
    order = dataclasses.replace(builder.order, indexes=[[wrong], *builder.order.indexes[1:]])
    broken = dataclasses.replace(builder, order=order)
    with pytest.raises(IndexError, match=r"document 1000\d+ of \d+"):
        list(prefetch_batches(broken, range(3), data_workers))


_RANK = """
import multiprocessing, os, signal, subprocess, sys
from pathlib import Path
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.loader import prefetch_batches
from multihop.pretrain.config import TrainingConfig

if sys.argv[4] == "stuck":
    import time
    from multihop.pretrain.data import loader
    loader._START_TIMEOUT_S = 1.0
    os.register_at_fork(after_in_child=lambda: time.sleep(1000))
config = TrainingConfig.model_validate_json(sys.argv[1])
builder = BatchBuilder.open(config, Path(sys.argv[2]), Path(sys.argv[3]), 0, 1, [2, 2])
steps = prefetch_batches(builder, range(8), 2)
workers = [process.pid for process in multiprocessing.active_children()]
other = " ".join(f"kill -TERM {pid}; kill -INT {pid};" for pid in workers)
if sys.argv[4] == "signaled":  # as soon as they are there, and at work
    subprocess.run(["sh", "-c", other], check=True)
first = next(steps)
if sys.argv[4] == "killed":
    print(*workers, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "signaled":
    subprocess.run(["sh", "-c", other], check=True)
    print(len(list(steps)))
"""


def test_data_workers_leave_signals_to_their_rank_and_die_with_it(data: Data, indexes: Path) -> None:
    config, folder = config_of("clm", PHASES), data("clm")
    build_indexes(indexes, open_dataset(folder), config)

    def rank(what: str) -> subprocess.CompletedProcess[str]:
        arguments = [config.model_dump_json(), str(folder), str(indexes), what]
        return subprocess.run([sys.executable, "-c", _RANK, *arguments], capture_output=True, text=True, timeout=120)

    signaled = rank("signaled")
    assert signaled.returncode == 0, signaled.stderr
    assert signaled.stdout.split() == ["6"]  # seven steps of eight are not skipped, and one was taken before
    stuck = rank("stuck")
    assert stuck.returncode == 1 and "RuntimeError: a data worker did not start within 1 s" in stuck.stderr
    unfinished = rank("unfinished")
    assert unfinished.returncode == 0, unfinished.stderr
    killed = rank("killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    orphans = [int(pid) for pid in killed.stdout.split()]
    assert len(orphans) == 2
    for _ in range(600):
        if not any(_is_running(pid) for pid in orphans):
            return
        time.sleep(0.05)
    raise AssertionError(f"data workers {orphans} outlived their rank")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_making_batches_imports_no_torch() -> None:
    code = "import sys, multihop.pretrain.data.batches, multihop.pretrain.data.index; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
