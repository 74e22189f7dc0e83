"""The peers of bench/near_duplicates.py, each a process: `near_duplicates_peers.py NAME TEXTS` prints JSON."""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SHINGLE_WORDS, PERMUTATIONS, THRESHOLD = 5, 128, 0.8
Measured = dict[str, Any]
_WORD = re.compile(r"\w+")


class Watch:
    """Wall-clock seconds and processor seconds of this process since its creation, by part."""

    def __init__(self) -> None:
        self.started = time.perf_counter(), time.process_time()
        self.seconds: dict[str, tuple[float, float]] = {}

    def lap(self, part: str) -> None:
        self.seconds[part] = time.perf_counter() - self.started[0], time.process_time() - self.started[1]


def ours(texts: list[str], folder: Path) -> Measured:
    import numpy as np
    import pyarrow as pa

    from multihop.data_prep.config import NearDuplicatesConfig
    from multihop.data_prep.duplicates.minhash import signatures
    from multihop.data_prep.duplicates.near import (
        CandidatePairs,
        FindClusters,
        candidate_pairs,
        find_clusters,
        plan_comparisons,
    )
    from multihop.data_prep.duplicates.signature_files import SignSplit, band_count, sign_split
    from multihop.data_prep.stages.documents import SCHEMA, content_hash
    from multihop.data_prep.stages.outputs import write_batches

    config = NearDuplicatesConfig(shingle_words=SHINGLE_WORDS, permutations=PERMUTATIONS, threshold=THRESHOLD)
    rows = [(*content_hash(text), len(text.encode()), 0, text) for text in texts]
    batches = []
    for start in range(0, len(rows), 3000):
        columns = zip(zip(*rows[start : start + 3000], strict=True), SCHEMA, strict=True)
        batch = [pa.array(values, kind.type) for values, kind in columns]
        batches.append(pa.RecordBatch.from_arrays(batch, schema=SCHEMA))
    signatures(batches[0].column("text"), SHINGLE_WORDS, PERMUTATIONS)  # makes the tables, once per process
    seen: set[int] = set()
    copies = [row for row, (first, *_) in enumerate(rows) if first in seen or seen.add(first)]
    write_batches(folder / "read.arrow", SCHEMA, iter(batches), "lz4")

    watch = Watch()
    for batch in batches:
        signatures(batch.column("text"), SHINGLE_WORDS, PERMUTATIONS)
    watch.lap("signatures")
    whole = Watch()
    split = SignSplit("split", str(folder), str(folder / "read.arrow"), np.array(copies, np.int64), config)
    signed = [sign_split(split).path]
    pairs = [
        candidate_pairs(CandidatePairs(f"{number}", str(folder / "pairs"), signed, *which, THRESHOLD)).path
        for number, which in enumerate(plan_comparisons(len(texts), band_count(config)))
    ]
    clusters = find_clusters(FindClusters("clusters", str(folder), signed, pairs))
    whole.lap("whole")
    packages = {name: version(name) for name in ("numpy", "pyarrow")}
    return {
        "seconds": watch.seconds | whole.seconds,
        "dropped": clusters.metadata["dropped"] + len(copies),
        "versions": packages,
    }


def ours_words(texts: list[str], folder: Path) -> Measured:
    import pyarrow as pa

    from multihop.data_prep.duplicates.minhash import signatures_of_words
    from multihop.data_prep.duplicates.shingles import read_words

    batches = [texts[start : start + 3000] for start in range(0, len(texts), 3000)]
    words = [list(read_words(pa.array(batch), SHINGLE_WORDS - 1)) for batch in batches]
    signatures_of_words(words[0], len(batches[0]), SHINGLE_WORDS, PERMUTATIONS)  # makes the tables, once per process
    watch = Watch()
    for parts, batch in zip(words, batches, strict=True):
        signatures_of_words(parts, len(batch), SHINGLE_WORDS, PERMUTATIONS)
    watch.lap("signatures")
    return {"seconds": watch.seconds, "dropped": None, "versions": {"numpy": version("numpy")}}


def datatrove(texts: list[str], folder: Path, split_at_blanks: bool = False) -> Measured:
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from loguru import logger

    logger.remove()
    config = MinhashConfig(n_grams=SHINGLE_WORDS, num_buckets=16, hashes_per_bucket=PERMUTATIONS // 16)
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    sign = MinhashDedupSignature(str(folder / "signatures"), config=config)
    if split_at_blanks:
        sign.word_tokenizer = type("Blanks", (), {"word_tokenize": staticmethod(str.split)})()
    sign.get_shingles(texts[0])
    watch = Watch()
    sign.run(iter(documents))
    watch.lap("signatures")
    signed, pairs = str(folder / "signatures"), str(folder / "pairs")
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(signed, pairs, config=config).run(None, bucket, config.num_buckets)
    MinhashDedupCluster(pairs, str(folder / "remove"), config=config).run(None, 0, 1)
    watch.lap("whole")
    removed = sum(path.stat().st_size for path in (folder / "remove").glob("*.remove")) // 4
    versions = {"datatrove": version("datatrove"), "spacy": version("spacy")}
    return {"seconds": watch.seconds, "dropped": removed, "versions": versions}


def datasketch(texts: list[str], folder: Path) -> Measured:
    from datasketch import MinHash, MinHashLSH

    watch = Watch()
    sketches = []
    for text in texts:
        sketch = MinHash(num_perm=PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in shingles(text)])
        sketches.append(sketch)
    watch.lap("signatures")
    index = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
    dropped = 0
    for number, sketch in enumerate(sketches):
        if any(sketches[other].jaccard(sketch) >= THRESHOLD for other in index.query(sketch)):
            dropped += 1
        else:
            index.insert(number, sketch)
    watch.lap("whole")
    return {"seconds": watch.seconds, "dropped": dropped, "versions": {"datasketch": version("datasketch")}}


def rensa(texts: list[str], folder: Path, of: Callable[[str], list[str]] = str.split, ready: bool = True) -> Measured:
    from rensa import RMinHash

    tokens = [of(text) for text in texts] if ready else texts
    watch = Watch()
    for document in tokens:
        sketch = RMinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update(document if ready else of(document))
        sketch.digest()
    watch.lap("signatures")
    return {"seconds": watch.seconds, "dropped": None, "versions": {"rensa": version("rensa")}}


def shingles(text: str) -> list[str]:
    words = _WORD.findall(text.lower())
    return [" ".join(words[at : at + SHINGLE_WORDS]) for at in range(max(1, len(words) - SHINGLE_WORDS + 1))]


RUN: dict[str, Callable[[list[str], Path], Measured]] = {
    "ours": ours,
    "ours-words": ours_words,
    "datatrove": datatrove,
    "datatrove-split": lambda texts, folder: datatrove(texts, folder, split_at_blanks=True),
    "datasketch": datasketch,
    "rensa": rensa,
    "rensa-shingles": lambda texts, folder: rensa(texts, folder, shingles),
    "rensa-text": lambda texts, folder: rensa(texts, folder, shingles, ready=False),
}


if __name__ == "__main__":
    with open(sys.argv[2]) as lines, tempfile.TemporaryDirectory(prefix="near-duplicates-peer-") as where:
        print(json.dumps(RUN[sys.argv[1]]([json.loads(line)["text"] for line in lines], Path(where))))
