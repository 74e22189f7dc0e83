"""`prepare`: the stages one after the other, from a recipe's sources to a data set with its manifest.

    hash       identities of the input files; when nothing changed, verify and end   a group of files
    read       documents, cleaned, filtered and hashed; what is bad set aside        a split
    choose     copies, near duplicates, evaluation texts: see `data_prep.choose`
    sample     held-out documents counted, the smallest ids found                    a split, hashes only
    draw       the documents with these ids                                          a split
    tokenizer  SentencePiece trained on them, or an existing one taken over          once
    encode     tokens and sentence ends                                              a split
    shards     batches of encoded splits, in order                                   a shard
    count      how often each piece occurs                                           a shard
    commit     the files take their places, and then the manifest                    once

`work` holds the stages' outputs. It may be deleted once the manifest stands: that costs time, not data.
"""

import hashlib
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.accounts import account, without_broken
from data_prep.choose import choose, kept_key
from data_prep.config import DataConfig, TokenizerConfig
from data_prep.documents import Kept, ReadSplit, read_split
from data_prep.encode import (
    EncodeSplit,
    TrainTokenizer,
    assemble_shard,
    encode_split,
    train_tokenizer,
)
from data_prep.files import make_folder, remove_temporaries, sync, write_atomically
from data_prep.identity import existing, inputs_key, rules_depend_on, settings_of
from data_prep.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    Manifest,
    TokenCounts,
    data_fingerprint,
    read_manifest,
    write_manifest,
)
from data_prep.reading import inputs
from data_prep.reading.sources import InputFile, Part, group_into_splits, list_files, told
from data_prep.sample import DrawSample, FindCandidates, draw_sample, find_candidates, largest_id, merge
from data_prep.shard_plan import plan_shards, shard_entry, shard_items, totals
from data_prep.shards import complaint, count_tokens, dataset_files, token_dtype
from data_prep.stages import Output, stage_key
from data_prep.tokenizers import tokenizer
from data_prep.tokenizers.tokenizer import info_complaint

MapSplits = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Runs a pure, picklable function on every item, anywhere, and yields the results in any order."""
Progress = Callable[[str, int, int], None]
"""Is told the stage, the items done, and all items."""

_Run = Callable[[str, Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Runs a stage's function on items and yields the results in any order: (stage's name, function, items)."""
_BESIDE = ".beside"
"""In the data set's folder: shards that wait for the others."""
_SPLITS: tuple[Literal["train"], Literal["heldout"]] = ("train", "heldout")


def map_in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
    """One after the other, here."""
    return map(function, items)


def identify(
    data: DataConfig,
    tok: TokenizerConfig,
    work: Path,
    map_splits: MapSplits = map_in_process,
    progress: Progress = lambda stage, done, total: None,
) -> str:
    """Names the data set of these settings and of the input as it is now, as 64 hex digits.

    Files whose size or time of change is not that of the last time are hashed, by `map_splits`; `work` remembers it.

    Raises ValueError for a missing source.
    """
    return _identify(data, tok, work, list_files(data.sources), _runner(map_splits, progress))[0]


def prepare(
    data: DataConfig,
    tok: TokenizerConfig,
    out_dir: Path,
    map_splits: MapSplits = map_in_process,
    progress: Progress = lambda stage, done, total: None,
    work: Path | None = None,
) -> Manifest:
    """Prepare the data set in `out_dir`, or what is not done of it; only one caller at a time may.

    With the same input and settings the files are the same bytes, whatever `map_splits` does and however often it
    was interrupted. `out_dir`, `work` and the input must be seen under the same paths wherever `map_splits` runs.
    Others may read the data set meanwhile: what is damaged in it is rebuilt under its manifest, and another that
    stands in `out_dir` stays until this one is made; then none is there for the moment of the renames.

    Args:
        work: where the stages' outputs are kept, for all data sets of the same sources; None: `out_dir`/work.

    Raises ValueError for a missing source, too many bad files or documents, an empty corpus, one without a held-out
    document where there shall be some, and a vocabulary that the text cannot support.
    """
    out_dir = out_dir.absolute()
    work = out_dir / "work" if work is None else work.absolute()
    run = _runner(map_splits, progress)

    def run_once(stage: str, function: Callable[[Any], Output], items: Sequence[Any]) -> list[Output]:
        by_key = {output.key: output for output in run(stage, function, items)}
        return [by_key[item.key] for item in items]

    inputs_key, files = _identify(data, tok, work, list_files(data.sources), run)
    make_folder(out_dir)
    beside = out_dir / _BESIDE
    for folder in (out_dir, beside):
        remove_temporaries(folder)
    standing = find_whole(out_dir, inputs_key, map_splits, progress)
    if standing is not None:
        if standing.format_version == 1:
            write_manifest(out_dir, standing)
        _remove_beside(beside)
        return read_manifest(out_dir)

    splits = group_into_splits(files)
    read = run_once("read", read_split, [read_item(work, parts, data) for parts in splits])
    if (again := without_broken(splits, read)) != splits:
        splits = again
        read = run_once("read", read_split, [read_item(work, parts, data) for parts in splits])
    read_counts, set_aside = account(splits, read, data.max_bad_fraction)

    used, chosen, chosen_counts = choose(work, read, data, run_once)
    sample_bytes = int(tok.sample_mb * 1e6)
    to_look = [FindCandidates(split, data.heldout_fraction, sample_bytes) for split in used]
    sample = merge(run("sample", find_candidates, to_look), sample_bytes)
    _check_heldout(sample.kept, sample.held, data.heldout_fraction)
    languages = tuple(source.language for source in data.sources)
    to_draw = used if tok.path is None else []
    largest = largest_id(sample, sample_bytes)
    drawn = run_once("draw", draw_sample, [_draw_item(work, split, largest, data) for split in to_draw])
    (trained,) = run_once("tokenizer", train_tokenizer, [_tokenizer_item(work, drawn, languages, tok)])
    encoded = run_once("encode", encode_split, [_encode_item(work, split, trained, languages, data) for split in used])
    plan = {split: plan_shards(encoded, split) for split in _SPLITS}
    if not plan["train"] or (data.heldout_fraction and not plan["heldout"]):
        raise ValueError("the tokenizer leaves no piece of the train or of the held-out documents; add text")

    items = [item for split in _SPLITS for item in shard_items(work, out_dir, beside, split, plan[split])]
    assembled = run_once("shards", assemble_shard, items)
    shards = [shard_entry(*made) for made in zip(items, chain(*plan.values()), assembled, strict=True)]

    content = Path(trained.path).read_bytes()
    info = tokenizer.describe(content, trained.sha256)
    counts = np.zeros(info.vocab_size, dtype=np.int64)
    to_count = [
        (made.path, info.vocab_size) for made, shard in zip(assembled, shards, strict=True) if shard.split == "train"
    ]
    for of_shard in run("count", count_tokens, to_count):
        counts += of_shard
    counted = _npy(counts)

    dtype = token_dtype(info.vocab_size)
    no_tokens = sum(output.facts["no tokens"] for output in encoded)
    manifest = Manifest(
        fingerprint=data_fingerprint(info.sha256, dtype, shards),
        inputs=inputs_key,
        tokenizer=info,
        token_dtype=dtype,
        shards=shards,
        token_counts=TokenCounts(sha256=hashlib.sha256(counted).hexdigest()),
        totals={split: totals(plan[split]) for split in _SPLITS},
        settings=settings_of(data, tok),
        counts={
            **read_counts,
            **chosen_counts,
            "encode": {"kept": sample.kept - no_tokens, "no tokens": no_tokens},
        },
        set_aside=set_aside,
        sources=[source.path for source in data.sources],
    )
    moves = {item.target: made.path for item, made in zip(items, assembled, strict=True) if made.path != item.target}
    _commit(out_dir, manifest, moves, {info.file: content, TOKEN_COUNTS: counted})
    _sweep(out_dir, work, manifest, [*read, *chosen, *drawn, trained, *encoded, *assembled])
    return manifest


def already_prepared(
    data: DataConfig, tok: TokenizerConfig, out_dir: Path, work: Path | None = None
) -> Manifest | None:
    """The data set in `out_dir`, if it is of these settings and of the input as it is now; nothing is written.

    Input files whose size and time of change are those of then are taken to be unchanged, shards of the right size
    to be whole: that takes no longer for a terabyte.

    Raises ValueError for a missing source.
    """
    identity = recall_identity(data, tok, out_dir / "work" if work is None else work)
    manifest = None if identity is None else _made_from(out_dir, identity)
    if manifest is None or any(not Path(path).exists() for path, _ in dataset_files(out_dir, manifest)):
        return None
    whole = all((out_dir / shard.file).stat().st_size == shard.bytes for shard in manifest.shards)
    return manifest if whole else None


def recall_identity(data: DataConfig, tok: TokenizerConfig, work: Path) -> str | None:
    """What `identify` would say, as far as `work` remembers all files as they are now; nothing is read or written.

    Raises ValueError for a missing source.
    """
    files = list_files(data.sources)
    hashes = inputs.recall(work / "inputs.json", files)
    return inputs_key(data, tok, files, hashes) if all(file.path in hashes for file in files) else None


def find_whole(
    out_dir: Path,
    identity: str,
    map_splits: MapSplits = map_in_process,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest | None:
    """The data set in `out_dir`, if it is the one that `identify` names and all its files have their hashes.

    Nothing is written, so any number of callers may look, also while one prepares.
    """
    standing = _made_from(out_dir, identity)
    if standing is None:
        return None
    damages = _runner(map_splits, progress)("verify", complaint, dataset_files(out_dir, standing))
    return None if any(damages) or info_complaint(out_dir, standing) else standing


def _runner(map_splits: MapSplits, progress: Progress) -> _Run:
    def run(stage: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        progress(stage, 0, len(items))
        for done, result in enumerate(map_splits(function, items), start=1):
            progress(stage, done, len(items))
            yield result

    return run


def _identify(
    data: DataConfig, tok: TokenizerConfig, work: Path, files: list[InputFile], run: _Run
) -> tuple[str, list[InputFile]]:
    make_folder(work)
    # First of all, for they may be what fills the disk.
    for folder in (work, *work.glob("*/")):
        remove_temporaries(folder)
    hashes = inputs.recall(work / "inputs.json", files)
    for found in run("hash", inputs.hash_files, inputs.groups([file for file in files if file.path not in hashes])):
        hashes |= found
    inputs.remember(work / "inputs.json", files, hashes)
    return inputs_key(data, tok, files, hashes), inputs.identified(files, hashes)


def _made_from(out_dir: Path, inputs_key: str) -> Manifest | None:
    """The manifest that stands in `out_dir`, if it is of this input and these settings."""
    try:
        manifest = read_manifest(out_dir)
    except ValueError:
        return None
    return manifest if manifest.inputs == inputs_key else None


def read_item(work: Path, parts: list[Part], data: DataConfig) -> ReadSplit:
    """The first stage's work on the parts of a split, whose files have their identities."""
    settings = [data.clean.model_dump(), data.filters.model_dump()]
    key = stage_key(
        "read", [], unicodedata.unidata_version, [told(part) for part in parts], settings, rules_depend_on(data)
    )
    return ReadSplit(key, str(work / "read"), parts, data.clean, data.filters)


def _draw_item(work: Path, split: Kept, largest: int, data: DataConfig) -> DrawSample:
    key = stage_key("draw", [], kept_key(split), data.heldout_fraction, largest)
    return DrawSample(key, str(work / "draw"), split, data.heldout_fraction, largest)


def _tokenizer_item(
    work: Path, drawn: list[Output], languages: tuple[str, ...], tok: TokenizerConfig
) -> TrainTokenizer:
    folder, paths = str(work / "tokenizer"), tuple(output.path for output in drawn)
    if tok.path is not None:
        return TrainTokenizer(stage_key("tokenizer", [], existing(tok)), folder, (), 0, languages, tok)
    depends_on = ["rounded scores", [output.sha256 for output in drawn], languages, tok.model_dump()]
    key = stage_key("tokenizer", ["sentencepiece", "sentencex"], *depends_on)
    return TrainTokenizer(key, folder, paths, sum(output.facts["bytes"] for output in drawn), languages, tok)


def _encode_item(work: Path, split: Kept, trained: Output, languages: tuple[str, ...], data: DataConfig) -> EncodeSplit:
    depends_on = [kept_key(split), trained.sha256, data.heldout_fraction, languages, unicodedata.unidata_version]
    key = stage_key("encode", ["sentencepiece", "sentencex"], *depends_on)
    return EncodeSplit(key, str(work / "encode"), split, data.heldout_fraction, trained.path, languages)


def _npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _commit(out_dir: Path, manifest: Manifest, moves: dict[str, str], contents: dict[str, bytes]) -> None:
    """Make `manifest` and its files the data set in `out_dir`. What stands there by these names is replaced.

    Args:
        moves: by where they shall stand, where shards stand that are whole and synced.
        contents: by name, what other files hold.
    """
    # No reader may see a manifest whose files are others. A repair replaces damaged files by what they were.
    if _fingerprint_of(out_dir) != manifest.fingerprint:
        (out_dir / MANIFEST).unlink(missing_ok=True)
        sync(out_dir)
    for target, made in moves.items():
        os.replace(made, target)
    for name, content in contents.items():
        write_atomically(out_dir / name, content)
    write_manifest(out_dir, manifest)


def _remove_beside(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _fingerprint_of(out_dir: Path) -> str | None:
    try:
        return read_manifest(out_dir).fingerprint
    except ValueError:
        return None


def _check_heldout(documents: int, held: int, fraction: float) -> None:
    if not documents:
        raise ValueError("data.sources hold no document; put text there, or correct data.sources[].field")
    if fraction and not held:
        raise ValueError(
            f"none of the {documents} documents falls into data.heldout_fraction={fraction:g}; add documents, raise it "
            f"(to about {min(0.5, 5 / documents):.2g}), or set it to 0"
        )
    if held == documents:
        raise ValueError(
            f"all {documents} documents fall into data.heldout_fraction={fraction:g}; lower it, or add documents"
        )


def _sweep(out_dir: Path, work: Path, manifest: Manifest, outputs: list[Output]) -> None:
    """Remove what earlier input, other settings and killed processes left behind."""
    _remove_beside(out_dir / _BESIDE)
    remove_temporaries(out_dir)
    current = {shard.file for shard in manifest.shards}
    for pattern in ("train-*.arrow", "heldout-*.arrow"):
        for path in out_dir.glob(pattern):
            if path.name not in current:
                path.unlink()
    keys = {output.key for output in outputs}
    for path in work.glob("*/*"):
        if path.stem not in keys:
            path.unlink()
