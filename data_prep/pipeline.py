"""`prepare`: the stages one after the other, from a recipe's sources to a data set with its manifest.

    hash       SHA-256 of the input files; when nothing changed, verify and end   a group of files
    read       documents, cleaned and hashed; what is bad set aside           a split
    dedup      exact copies dropped, held-out documents chosen                all at once, hashes only
    tokenizer  SentencePiece trained on the smallest ids, or an existing one  once
    encode     tokens and sentence ends                                       a split
    shards     batches of encoded splits, in order, and then the manifest     a shard

`out_dir/work` holds the stages' outputs. It may be deleted once the manifest stands: that costs time, not data.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from data_prep import inputs, tokenizer
from data_prep.accounts import account
from data_prep.config import DataConfig, TokenizerConfig
from data_prep.dedup import first_copies, held_out
from data_prep.documents import ReadSplit, read_hashes, read_split
from data_prep.encode import (
    AssembleShard,
    EncodeSplit,
    Kept,
    TrainTokenizer,
    assemble_shard,
    encode_split,
    train_tokenizer,
)
from data_prep.files import sha256_file, sha256_json, write_atomically
from data_prep.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    Manifest,
    Shard,
    TokenCounts,
    Totals,
    data_fingerprint,
    read_manifest,
    write_manifest,
)
from data_prep.shards import SHARD_BYTES, complaint, count_tokens, dataset_files, token_dtype
from data_prep.sources import InputFile, Part, group_into_splits, list_files
from data_prep.stages import Output
from data_prep.tokenizer_files import adopt

T = TypeVar("T")
R = TypeVar("R")
MapSplits = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Runs a pure, picklable function on every item, anywhere, and yields the results in any order."""
Progress = Callable[[str, int, int], None]
"""Is told the stage, the items done, and all items."""

_SPLITS: tuple[Literal["train"], Literal["heldout"]] = ("train", "heldout")
_Batches = list[dict[str, Any]]
"""Facts of `encode_split` on batches, each with the path, hash and number of where it stands."""


def settings_of(data: DataConfig, tok: TokenizerConfig) -> dict[str, Any]:
    """What a prepared data set depends on. Weights are not part of it: they choose among samples when training."""
    without_weights = data.model_dump(mode="json", exclude={"sources": {"__all__": {"weight"}}})
    return {"data": without_weights, "tokenizer": tok.model_dump(mode="json")}


def settings_key(data: DataConfig, tok: TokenizerConfig) -> str:
    """16 hex digits that name the settings of a prepared data set."""
    return sha256_json(settings_of(data, tok))[:16]


def map_in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
    """One after the other, here."""
    return map(function, items)


def prepare(
    data: DataConfig,
    tok: TokenizerConfig,
    out_dir: Path,
    map_splits: MapSplits = map_in_process,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Prepare the data set in `out_dir`, or what is not done of it; only one caller at a time may.

    With the same input and settings the files are the same bytes, whatever `map_splits` does and however often it
    was interrupted. `out_dir` and the input must be seen under the same paths wherever `map_splits` runs.

    Raises ValueError for a missing source, too many bad files or documents, an empty corpus, one without a held-out
    document where there shall be some, and a vocabulary that the text cannot support.
    """
    out_dir = out_dir.absolute()
    work = out_dir / "work"
    files = list_files(data.sources)
    work.mkdir(parents=True, exist_ok=True)

    def run(stage: str, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        progress(stage, 0, len(items))
        for done, result in enumerate(map_splits(function, items), start=1):
            progress(stage, done, len(items))
            yield result

    def run_once(stage: str, function: Callable[[Any], Output], items: Sequence[Any]) -> list[Output]:
        by_key = {output.key: output for output in run(stage, function, items)}
        return [by_key[item.key] for item in items]

    hashes = inputs.recall(work / "inputs.json", files)
    for found in run("hash", inputs.hash_files, inputs.groups([file for file in files if file.path not in hashes])):
        hashes |= found
    inputs.remember(work / "inputs.json", files, hashes)

    inputs_key = _inputs_key(data, tok, files, hashes)
    standing = _made_from(out_dir, inputs_key)
    if standing is not None and not any(run("verify", complaint, dataset_files(out_dir, standing))):
        return standing

    splits = group_into_splits(files)
    read = run_once("read", read_split, [_read_item(work, parts, hashes) for parts in splits])
    read_counts, set_aside = account(splits, read, data.max_bad_fraction)

    unique, train = _choose(read, data)
    (trained,) = run_once("tokenizer", train_tokenizer, [_tokenizer_item(work, unique, train, data, tok)])
    encoded = run_once("encode", encode_split, [_encode_item(work, split, trained, data) for split in unique])
    plan = {split: _plan_shards(encoded, split) for split in _SPLITS}
    if not plan["train"] or (data.heldout_fraction and not plan["heldout"]):
        raise ValueError("the tokenizer leaves no piece of the train or of the held-out documents; add text")

    # From here on files of the data set are replaced: it does not exist until its manifest is written again.
    (out_dir / MANIFEST).unlink(missing_ok=True)
    items = [item for split in _SPLITS for item in _shard_items(work, out_dir, split, plan[split])]
    assembled = run_once("shards", assemble_shard, items)
    shards = [_shard(*made) for made in zip(items, chain(*plan.values()), assembled, strict=True)]

    content = Path(trained.path).read_bytes()
    info = tokenizer.describe(content, trained.sha256)
    write_atomically(out_dir / info.file, content)
    counts = np.zeros(info.vocab_size, dtype=np.int64)
    to_count = [(str(out_dir / shard.file), info.vocab_size) for shard in shards if shard.split == "train"]
    for of_shard in run("count", count_tokens, to_count):
        counts += of_shard
    _write_array(out_dir / TOKEN_COUNTS, counts)

    dtype = token_dtype(info.vocab_size)
    kept, copies = sum(split.documents for split in unique), sum(len(split.dropped) for split in unique)
    no_tokens = sum(output.facts["no tokens"] for output in encoded)
    manifest = Manifest(
        fingerprint=data_fingerprint(info.sha256, dtype, shards),
        inputs=inputs_key,
        tokenizer=info,
        token_dtype=dtype,
        shards=shards,
        token_counts=TokenCounts(sha256=sha256_file(out_dir / TOKEN_COUNTS)),
        totals={split: _totals(plan[split]) for split in _SPLITS},
        settings=settings_of(data, tok),
        counts={
            "read": read_counts,
            "dedup": {"kept": kept, "copy of another": copies},
            "encode": {"kept": kept - no_tokens, "no tokens": no_tokens},
        },
        set_aside=set_aside,
        sources=[source.path for source in data.sources],
    )
    write_manifest(out_dir, manifest)
    _sweep(out_dir, manifest, [*read, trained, *encoded, *assembled])
    return manifest


def already_prepared(data: DataConfig, tok: TokenizerConfig, out_dir: Path) -> Manifest | None:
    """The data set in `out_dir`, if it is of these settings and of the input as it is now; nothing is written.

    Input files whose size and time of change are those of then are taken to be unchanged, shards of the right size
    to be whole: that takes no longer for a terabyte.

    Raises ValueError for a missing source.
    """
    files = list_files(data.sources)
    hashes = inputs.recall(out_dir / "work" / "inputs.json", files)
    if any(file.path not in hashes for file in files):
        return None
    manifest = _made_from(out_dir, _inputs_key(data, tok, files, hashes))
    if manifest is None or any(not Path(path).exists() for path, _ in dataset_files(out_dir, manifest)):
        return None
    whole = all((out_dir / shard.file).stat().st_size == shard.bytes for shard in manifest.shards)
    return manifest if whole else None


def _inputs_key(data: DataConfig, tok: TokenizerConfig, files: list[InputFile], hashes: dict[str, str]) -> str:
    return sha256_json([settings_of(data, tok), [[f.source, f.name, hashes[f.path]] for f in files], *_existing(tok)])


def _existing(tok: TokenizerConfig) -> list[str]:
    """The content of a tokenizer that is not trained here, as its hash."""
    return [] if tok.path is None else [hashlib.sha256(adopt(tok.path, tok.lowercase)).hexdigest()]


def _made_from(out_dir: Path, inputs_key: str) -> Manifest | None:
    """The manifest that stands in `out_dir`, if it is of this input and these settings."""
    try:
        manifest = read_manifest(out_dir)
    except ValueError:
        return None
    return manifest if manifest.inputs == inputs_key else None


def _key(stage: str, packages: list[str], *depends_on: Any) -> str:
    """Names an output by all that decides its bytes: other versions of a package may write others."""
    return sha256_json([stage, 1, {name: version(name) for name in ["pyarrow", *packages]}, depends_on])[:32]


def _read_item(work: Path, parts: list[Part], hashes: dict[str, str]) -> ReadSplit:
    told = [
        [
            hashes[part.file.path],
            part.start,
            part.stop,
            part.file.source,
            part.file.field,
            part.file.format,
            part.file.gz,
        ]
        for part in parts
    ]
    return ReadSplit(_key("read", [], unicodedata.unidata_version, told), str(work / "read"), parts)


def _tokenizer_item(
    work: Path, unique: list[Kept], train: np.ndarray, data: DataConfig, tok: TokenizerConfig
) -> TrainTokenizer:
    """Train on the train documents with the smallest ids, `sample_mb` of them and at least one; or take one over."""
    if tok.path is not None:
        key = _key("tokenizer", [], _existing(tok))
        return TrainTokenizer(key, str(work / "tokenizer"), [], 0.0, 0, 0, tok)
    train = train[np.argsort(train["first"], kind="stable")]
    within = int(np.searchsorted(np.cumsum(train["bytes"], dtype=np.int64), tok.sample_mb * 1e6, side="right"))
    taken = min(max(within, 1), len(train))
    largest_id = int(train["first"][taken - 1])
    told = [[split.sha256, split.dropped.tolist()] for split in unique]
    key = _key(
        "tokenizer",
        ["sentencepiece", "sentencex"],
        "rounded scores",
        told,
        data.heldout_fraction,
        largest_id,
        tok.model_dump(),
    )
    sample_bytes = int(train["bytes"][:taken].sum(dtype=np.int64))
    return TrainTokenizer(key, str(work / "tokenizer"), unique, data.heldout_fraction, largest_id, sample_bytes, tok)


def _encode_item(work: Path, split: Kept, trained: Output, data: DataConfig) -> EncodeSplit:
    told = [split.sha256, split.dropped.tolist(), trained.sha256, data.heldout_fraction]
    key = _key("encode", ["sentencepiece", "sentencex"], unicodedata.unidata_version, *told)
    return EncodeSplit(key, str(work / "encode"), split, data.heldout_fraction, trained.path)


def _choose(read: list[Output], data: DataConfig) -> tuple[list[Kept], np.ndarray]:
    """The splits without copies, and the hashes (as `read_hashes`) of what is kept and not held out."""
    per_split = [read_hashes(output.path) for output in read]
    documents = np.concatenate(per_split)
    if not len(documents):
        raise ValueError("data.sources hold no document; put text there, or correct data.sources[].field")
    kept = first_copies(documents["first"], documents["second"])
    held = held_out(documents["second"], data.heldout_fraction)
    _check_heldout(int(kept.sum()), int((kept & held).sum()), data.heldout_fraction)
    bounds = np.cumsum([len(part) for part in per_split])[:-1]
    unique = [
        Kept(output.path, output.sha256, int(part.sum()), np.flatnonzero(~part))
        for output, part in zip(read, np.split(kept, bounds), strict=True)
    ]
    return unique, documents[kept & ~held]


def _plan_shards(encoded: list[Output], split: str) -> list[_Batches]:
    """The batches of each shard of `split`, in the order of the input, about SHARD_BYTES a shard."""
    shards: list[_Batches] = []
    room = 0
    for output in encoded:
        for number, facts in enumerate(output.facts["batches"]):
            if facts["split"] != split:
                continue
            if not shards or facts["bytes"] > room:
                shards.append([])
                room = SHARD_BYTES
            shards[-1].append({**facts, "path": output.path, "sha256": output.sha256, "number": number})
            room -= facts["bytes"]
    return shards


def _shard_items(
    work: Path, out_dir: Path, split: Literal["train", "heldout"], plan: list[_Batches]
) -> list[AssembleShard]:
    items = []
    for number, batches in enumerate(plan):
        target = out_dir / f"{split}-{number:05d}.arrow"
        key = _key("shard", [], target.name, [[batch["sha256"], batch["number"]] for batch in batches])
        chosen = [(batch["path"], batch["number"]) for batch in batches]
        items.append(AssembleShard(key, str(work / "shards"), split, str(target), chosen))
    return items


def _shard(item: AssembleShard, batches: _Batches, output: Output) -> Shard:
    return Shard(
        file=Path(item.target).name,
        split=item.split,
        documents=sum(facts["documents"] for facts in batches),
        tokens=sum(facts["tokens"] for facts in batches),
        bytes=output.facts["bytes"],
        sha256=output.sha256,
    )


def _totals(plan: list[_Batches]) -> Totals:
    batches = list(chain(*plan))
    names = ("documents", "sentences", "tokens", "text_bytes")
    return Totals(**{name: sum(facts[name] for facts in batches) for name in names})


def _write_array(path: Path, array: np.ndarray) -> None:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def _check_heldout(documents: int, held: int, fraction: float) -> None:
    if fraction and not held:
        raise ValueError(
            f"none of the {documents} documents falls into data.heldout_fraction={fraction:g}; add documents, raise it "
            f"(to about {min(0.5, 5 / documents):.2g}), or set it to 0"
        )
    if held == documents:
        raise ValueError(
            f"all {documents} documents fall into data.heldout_fraction={fraction:g}; lower it, or add documents"
        )


def _sweep(out_dir: Path, manifest: Manifest, outputs: list[Output]) -> None:
    """Remove what earlier input, other settings and killed processes left behind."""
    current = {shard.file for shard in manifest.shards}
    for pattern in ("train-*.arrow", "heldout-*.arrow", ".*.tmp"):
        for path in out_dir.glob(pattern):
            if path.name not in current:
                path.unlink()
    keys = {output.key for output in outputs}
    for path in (out_dir / "work").glob("*/*"):
        if path.stem not in keys:
            path.unlink()
