"""The ways to turn JSON lines into tokens on the disk, each run by `bench/prepare_text.py` in a process of its own.

`python bench/prepare_text_peers.py WHO --texts FOLDER --tokenizer FOLDER --out FOLDER --workers N` prints, as JSON, the
seconds that the work took after all imports, the bytes of text in UTF-8 and the tokens. The peers are imported where
they are used, because they are installed in an environment of their own.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def _import_all(number: int) -> None:
    """Import what the work needs; pyarrow imports pandas with the first array."""
    import pyarrow as pa

    from multihop.data_prep.pipeline.prepare import prepare

    assert callable(prepare) and len(pa.array(["a"])) == 1


def ours(texts: Path, tokenizer: Path, out: Path, workers: int) -> Result:
    """Run `prepare` as `multihop prep` does, with processes instead of Ray: reading, cleaning, exact copies, shards."""
    from multiprocessing import get_context

    from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
    from multihop.data_prep.pipeline.prepare import prepare
    from multihop.data_prep.stages.runner import map_in_process

    data = DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.0)
    with get_context("spawn").Pool(workers) as pool:
        pool.map(_import_all, range(4 * workers))
        _import_all(0)
        started = time.perf_counter()
        spread = map_in_process if workers == 1 else pool.imap_unordered
        manifest = prepare(data, TokenizerConfig(path=str(tokenizer / "tokenizer.model")), out, spread)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": manifest.totals["train"].tokens, "version": version("multihop")}


def sentencepiece(texts: Path, tokenizer: Path, out: Path, workers: int) -> Result:
    """Run SentencePiece alone on documents in memory: the upper limit for any code that passes every word to it."""
    import gzip

    from sentencepiece import SentencePieceProcessor

    documents = []
    for path in sorted(texts.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            documents += [json.loads(line)["text"] for line in lines]
    processor = SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
    started = time.perf_counter()
    tokens = sum(map(len, processor.encode(documents, num_threads=workers)))
    seconds = time.perf_counter() - started
    size = sum(len(document.encode()) for document in documents)
    return {"seconds": seconds, "tokens": tokens, "text_bytes": size, "version": version("sentencepiece")}


def datasets(texts: Path, tokenizer: Path, out: Path, workers: int) -> Result:
    """Run `load_dataset` on the JSON lines and `map` with the fast tokenizer of the same vocabulary."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], add_special_tokens=False)["input_ids"]}

    started = time.perf_counter()
    files = sorted(map(str, texts.rglob("*.jsonl.gz")))
    rows = load_dataset("json", data_files=files, split="train", cache_dir=str(out / "cache"))
    encoded = rows.map(encode, batched=True, num_proc=workers, remove_columns=rows.column_names)
    encoded.save_to_disk(str(out / "tokens"))
    seconds = time.perf_counter() - started
    tokens = sum(len(ids) for ids in encoded["input_ids"])
    return {"seconds": seconds, "tokens": tokens, "version": version("datasets")}


def datatrove(texts: Path, tokenizer: Path, out: Path, workers: int) -> Result:
    """Run datatrove's reader of JSON lines and its tokenizer, with one task per file."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    started = time.perf_counter()
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(texts), glob_pattern="**/*.jsonl.gz"),
            DocumentTokenizer(
                str(out / "tokens"), tokenizer_name_or_path=str(tokenizer / "tokenizer.json"), eos_token=None
            ),
        ],
        tasks=len(list(texts.rglob("*.jsonl.gz"))),
        workers=workers,
        logging_dir=str(out / "logs"),
    ).run()
    seconds = time.perf_counter() - started
    tokens = sum(path.stat().st_size for path in (out / "tokens").glob("*.ds")) // 2
    return {"seconds": seconds, "tokens": tokens, "version": version("datatrove")}


WAYS: dict[str, Callable[[Path, Path, Path, int], Result]] = {
    way.__name__: way for way in (ours, sentencepiece, datasets, datatrove)
}


def main() -> None:
    """Run one way and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", choices=WAYS)
    for name in ("--texts", "--tokenizer", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    result = WAYS[options.who](options.texts, options.tokenizer, options.out, options.workers)
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
