"""Measure how the order of samples grows with the data: `python bench/scale_index.py SUBCOMMAND`.

    index        build, open and read the sample index of each objective, by the number of documents
    windows      find the shards of an index and shuffle by windows of them, by the number of shards
    streaming    fetch shards during training from an S3 endpoint, by the number of shards

Documents have 30 to 50 tokens in two sentences, which are also the sides of a pair, and samples have 128 tokens.
"""

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scale_data import Row, main, make_dataset, measure, s3_endpoint, with_requests

from multihop.data_prep.dataset.shards import Documents, list_array, shard_schema, write_shard
from multihop.pretrain.data.array_file import ensure_array, open_array
from multihop.pretrain.data.index import SampleIndex, index_rows
from multihop.pretrain.data.order import PhaseStream
from multihop.pretrain.data.shard_windows import ShardWindows, shards_of_index
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.objective import objective_of

OBJECTIVES = ("clm", "mlm", "bilm", "mlm+nsp", "mlm+sop", "translation", "completion", "ctc")
LARGEST = {"mlm+nsp": 1_000_000, "mlm+sop": 1_000_000}
"""Number of documents; more would take most of a minute."""
SEQ_LEN, BATCH = 128, 512
SHARD_DOCUMENTS = 100_000
WINDOW = 16
FETCHED = 20
"""Shards that are fetched during training."""


def index(folder: Path, size: int) -> Iterator[Row]:
    """Measure the index of `size` documents for each objective, and a jump in 10,000 samples for each document."""
    shards = make_shards(folder, size)

    def build(objective: ObjectiveConfig, path: Path) -> dict[str, Any]:
        documents, module = Documents(shards), objective_of(objective)
        ensure_array(path, lambda: module.build_index(documents, SEQ_LEN, 1, objective))
        rows = np.load(path, mmap_mode="r")
        samples = module.sample_count(rows, SEQ_LEN)
        return {"samples": samples, "bytes_per_sample": round(rows.nbytes / samples, 1)}

    def first_batch(objective: ObjectiveConfig, path: Path) -> dict[str, Any]:
        documents, module = Documents(shards), objective_of(objective)
        rows = open_array(path, np.int64, "the index")
        whole = SampleIndex(rows, 0, len(documents), module.sample_count(rows, SEQ_LEN))
        ids = PhaseStream(0, "data", 0, [whole.size]).samples_at(np.arange(BATCH))
        read = index_rows(objective, [whole], ids.sources, ids.samples, SEQ_LEN)
        spans = [span for row in read for span in module.spans(documents, row, SEQ_LEN, objective)]
        return {"tokens": sum(len(documents.tokens(each)[start:stop]) for each, start, stop in spans)}

    for name in OBJECTIVES:
        if size > LARGEST.get(name, size):
            continue
        objective, path = ObjectiveConfig.model_validate({"name": name}), folder / f"{size}-{name}.npy"
        yield measure(f"{name}: build", build, objective, path)
        yield measure(f"{name}: open, first batch of {BATCH}", first_batch, objective, path)
        path.unlink()
    stream = PhaseStream(0, "data", 0, [size * 10_000])
    jump = np.arange(10**9 * BATCH, (10**9 + 1) * BATCH)
    yield measure(f"jump to step 10^9 of {BATCH} samples", lambda: {"epoch": int(stream.samples_at(jump).epochs[0])})


def make_shards(folder: Path, documents: int) -> list[Path]:
    """Write shards of `SHARD_DOCUMENTS` documents, which are names of one file."""
    import pyarrow as pa

    rng, count = np.random.default_rng(0), SHARD_DOCUMENTS
    lengths = rng.integers(30, 51, count)
    ends, bounds = np.stack([lengths // 2, lengths], axis=1), np.concatenate([[0], np.cumsum(lengths)])
    schema = shard_schema("uint16")
    columns = [
        pa.array(np.arange(count, dtype=np.uint64)),
        pa.array(np.zeros(count, np.uint16)),
        list_array(bounds, rng.integers(0, 30_000, bounds[-1]).astype(np.uint16), schema.field("tokens").type),
        list_array(2 * np.arange(count + 1), ends.ravel().astype(np.uint32), schema.field("sentence_ends").type),
    ]
    paths = [folder / f"{documents}-{number}.arrow" for number in range(documents // count)]
    write_shard(paths[0], [pa.RecordBatch.from_arrays(columns, schema=schema)])
    for path in paths[1:]:
        os.link(paths[0], path)
    return paths


def windows(folder: Path, size: int) -> Iterator[Row]:
    """Measure finding `size` shards of 100 documents in indexes, and a step in windows of 16 of them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(30, 51, 100 * size)
    starts = list(range(0, 100 * size + 1, 100))
    stream = np.concatenate([[0], np.cumsum(lengths + 1)])
    begins = np.arange(0, stream[-1] - SEQ_LEN, SEQ_LEN)
    documents = np.searchsorted(stream, begins, side="right") - 1
    spans = np.stack([documents, begins - stream[documents], documents, begins * 0 + 1], axis=1)
    for name, rows in {"clm": stream, "mlm": spans}.items():
        objective = ObjectiveConfig.model_validate({"name": name})
        path = folder / f"{size}-{name}.npy"
        np.save(path, rows)
        samples = objective_of(objective).sample_count(rows, SEQ_LEN)
        whole = SampleIndex(np.load(path, mmap_mode="r"), 0, 100 * size, samples)
        yield measure(f"{name}: find the shards", find_shards, objective, whole, starts)
    shuffled = ShardWindows(shards_of_index(objective, whole, starts, SEQ_LEN).first_samples, WINDOW)

    def steps(call: Any, count: int) -> dict[str, Any]:
        for step in range(count):
            call(np.arange(step * BATCH, (step + 1) * BATCH), "epoch", 0)
        return {"steps": count}

    yield measure("samples of 10 steps", steps, shuffled.samples, 10)
    yield measure("shards of 10 steps", steps, shuffled.shards, 10)


def find_shards(objective: ObjectiveConfig, whole: SampleIndex, starts: list[int]) -> dict[str, Any]:
    """Find the first sample that begins in each shard."""
    return {"samples": int(shards_of_index(objective, whole, starts, SEQ_LEN).first_samples[-1])}


def streaming(folder: Path, size: int) -> Iterator[Row]:
    """Measure a node that fetches 20 of `size` small shards during training. The endpoint's time is not counted as the
    processor's, but it is in the clock's."""
    from multihop.cluster.remote.node_cache import RemoteRunSpec, fetch_data, fetch_requested_shards
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.pretrain.data.shard_requests import request_shards

    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{size}")
    data = make_dataset(folder / f"streaming-{size}", size)
    wanted = [shard.file for shard in read_data_manifest(data).of_split("train")][:FETCHED]

    def fetch(spec: RemoteRunSpec, run_dir: Path, names: list[str]) -> dict[str, Any]:
        run_dir.mkdir(exist_ok=True)
        request = threading.Timer(0.5, request_shards, (run_dir, names))
        with fetch_data(spec) as copy, fetch_requested_shards(spec, run_dir, copy) as fails:
            request.start()
            while not all((copy / name).exists() for name in names):
                assert fails() is None, fails()
                threading.Event().wait(0.02)
        return {"fetched": len(names)}

    with s3_endpoint() as server:
        spec = RemoteRunSpec(f"s3://{server.make_bucket()}/runs", "run", "set", streams=True)
        store(spec, data, {*wanted})
        run = partial(fetch, spec, folder / f"run-{size}")
        yield with_requests(server, "start without shards", lambda: run([]))
        yield with_requests(server, f"start, fetch {FETCHED} shards", lambda: run(wanted))


def store(spec: Any, data: Path, wanted: set[str]) -> None:
    """Push a data set's listing of all files, but of the training shards only the wanted ones."""
    from multihop.common import mirror
    from multihop.common.files import canonical_json, sha256_json
    from multihop.common.storage import open_folder
    from multihop.data_prep.dataset.manifest import read_data_manifest

    shards = read_data_manifest(data).of_split("train")
    remote = open_folder(f"{spec.runs}/{spec.data}")
    mirror.push(data, remote, {shard.file for shard in shards} - wanted)
    files = mirror.read_listing(remote)
    files |= {shard.file: {"bytes": shard.bytes, "sha256": shard.sha256} for shard in shards}
    remote.write_atomically(mirror.LISTING, canonical_json({"files": files, "sha256": sha256_json(files)}))


if __name__ == "__main__":
    main(
        __doc__,
        {
            "index": (index, [100_000, 1_000_000, 10_000_000]),
            "windows": (windows, [1_000, 10_000, 100_000]),
            "streaming": (streaming, [1_000, 10_000]),
        },
    )
