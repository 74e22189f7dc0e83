"""The ways to read documents' tokens in random order, each run by `bench/read_tokens.py` in a process of its own.

`python bench/read_tokens_peers.py build|read WHO --data FOLDER --store FOLDER --reads N`: `build` puts the documents of
a prepared data set (FOLDER) into the peer's own format under --store; `read` opens it and reads N documents in an
order that is the same for all, and prints as JSON the seconds of both and the sum of the tokens that it read.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Read = Callable[[int], np.ndarray]


def documents_of(data: Path) -> Iterator[np.ndarray]:
    """Yield the tokens of each training document."""
    import pyarrow as pa

    for path in sorted(data.glob("train-*.arrow")):
        with pa.memory_map(str(path)) as mapped:
            column = pa.ipc.open_file(mapped).read_all().column("tokens").combine_chunks()
            for i in range(len(column)):
                yield column[i].values.to_numpy()


def open_ours(data: Path, store: Path) -> Read:
    from multihop.data_prep.dataset.shards import open_dataset

    return open_dataset(data).train.tokens


def build_datasets(data: Path, store: Path) -> None:
    from datasets import Dataset

    Dataset.from_generator(lambda: ({"tokens": tokens} for tokens in documents_of(data))).save_to_disk(str(store))


def open_datasets(data: Path, store: Path) -> Read:
    from datasets import load_from_disk

    rows: Any = load_from_disk(str(store)).with_format("numpy")
    return lambda i: rows[i]["tokens"]


def _same(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": tokens}


def build_litdata(data: Path, store: Path) -> None:
    import litdata

    # litdata needs inputs that can be sent to its workers.
    inputs = [np.array(tokens) for tokens in documents_of(data)]
    litdata.optimize(fn=_same, inputs=inputs, output_dir=str(store), num_workers=1, chunk_bytes="64MB")


def open_litdata(data: Path, store: Path) -> Read:
    import litdata

    rows = litdata.StreamingDataset(str(store))
    return lambda i: rows[i]["tokens"]


def build_streaming(data: Path, store: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(store), columns={"tokens": "ndarray"}) as writer:
        for tokens in documents_of(data):
            writer.write({"tokens": np.array(tokens)})


def open_streaming(data: Path, store: Path) -> Read:
    from streaming import StreamingDataset

    rows = StreamingDataset(local=str(store), shuffle=False, batch_size=1)
    return lambda i: rows[i]["tokens"]


BUILD = {"datasets": build_datasets, "litdata": build_litdata, "streaming": build_streaming}
OPEN = {"ours": open_ours, "datasets": open_datasets, "litdata": open_litdata, "streaming": open_streaming}
PACKAGES = {"ours": "multihop", "streaming": "mosaicml-streaming"}


def main() -> None:
    """Build the store of one way, or read from it and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "read"])
    parser.add_argument("who", choices=OPEN)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--reads", type=int, required=True)
    options = parser.parse_args()
    if options.what == "build":
        BUILD[options.who](options.data, options.store)
        return
    documents = sum(1 for _ in documents_of(options.data))
    order = np.random.default_rng(0).integers(documents, size=options.reads).tolist()
    OPEN[options.who](options.data, options.store)(order[0])  # imports, and files into the page cache
    started = time.perf_counter()
    read = OPEN[options.who](options.data, options.store)
    read(order[0])
    opened = time.perf_counter()
    tokens = checksum = 0
    for i in order:
        found = read(i)
        tokens += len(found)
        checksum += int(found.sum())
    seconds = time.perf_counter() - opened
    package = PACKAGES.get(options.who, options.who)
    result = {"seconds": seconds, "open_s": opened - started, "tokens": tokens, "checksum": checksum}
    print("\n" + json.dumps({**result, "version": version(package)}), flush=True)


if __name__ == "__main__":
    main()
