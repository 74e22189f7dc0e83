"""`prepare` runs the stages from a recipe's sources to a data set with its manifest.

    hash       identify the input files; end if the data set exists and is whole     a group of files
    read       read, clean, filter and hash documents; set bad ones aside            a split
    choose     copies, near duplicates, evaluation texts: see `multihop.data_prep.pipeline.choose`
    sample     count held-out documents, find the smallest ids                       a split, hashes only
    draw       take the documents with these ids                                     a split
    tokenizer  train SentencePiece on them, or convert an existing tokenizer         once, or each side of pairs
    unknown    of pairs, count unknown tokens in a sample; end if there are too many a split
    encode     tokens and sentence ends                                              a split
    shards     batches of encoded splits, in order                                   a shard
    count      count each token                                                      a shard
    commit     move the files into place, then write the manifest                    once

`work` holds the stages' outputs. It may be deleted once the data set is prepared: that costs time, not data.
"""

import hashlib
import os
import shutil
import unicodedata
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from multihop.common.errors import UserError
from multihop.common.files import make_folder, remove_temporaries, sync, write_atomically
from multihop.common.mapping import MapItems, ReportProgress, map_in_process, no_report, reporting
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.find import find_whole
from multihop.data_prep.dataset.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    Manifest,
    TokenCounts,
    data_fingerprint,
    encode_manifest,
    read_data_manifest,
    write_manifest,
)
from multihop.data_prep.dataset.shards import count_target_tokens, count_tokens, token_dtype
from multihop.data_prep.dataset.verify import remember
from multihop.data_prep.pipeline.accounts import account, nothing_left, without_broken
from multihop.data_prep.pipeline.choose import Stages, choose, kept_key
from multihop.data_prep.pipeline.coverage import CHECKED_BYTES, CountUnknown, check_coverage, count_unknown
from multihop.data_prep.pipeline.encode import (
    EncodeSplit,
    TrainTokenizer,
    assemble_shard,
    encode_split,
    train_tokenizer,
)
from multihop.data_prep.pipeline.identity import (
    ResolvedInputs,
    existing,
    make_work_folder,
    resolve_inputs,
    rules_depend_on,
    settings_of,
)
from multihop.data_prep.pipeline.sample import (
    DrawSample,
    FindCandidates,
    draw_sample,
    find_candidates,
    largest_id,
    merge,
)
from multihop.data_prep.pipeline.shard_plan import plan_shards, shard_entry, shard_items, totals
from multihop.data_prep.reading.sources import Part, group_into_splits, list_files, part_key
from multihop.data_prep.stages.documents import Kept, ReadSplit, read_split
from multihop.data_prep.stages.in_store import StoredStages
from multihop.data_prep.stages.outputs import Output, on_disk, stage_key
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.info import TARGET_TOKENIZER, TOKENIZER

_BESIDE = ".beside"
"""In the data set's directory: shards that wait for the commit."""
_SPLITS: tuple[Literal["train"], Literal["heldout"]] = ("train", "heldout")


def prepare(
    data: DataConfig,
    tok: TokenizerConfig,
    out_dir: Path,
    map_items: MapItems = map_in_process,
    report: ReportProgress = no_report,
    work: Path | None = None,
    resolved: ResolvedInputs | None = None,
    stored: StoredStages | None = None,
) -> Manifest:
    """Prepare the data set in `out_dir`, or what is not done of it; only one caller at a time may.

    With the same input and settings the files are the same bytes, whatever `map_items` does and however often it
    was interrupted. `out_dir`, `work` and the input must have the same paths wherever `map_items` runs.
    Others may read the data set meanwhile: damaged files are rebuilt under their manifest, and a different data set in
    `out_dir` stays until this one is made; then there is none for the moment of the renames.

    Args:
        work: where the stages' outputs are kept, for all data sets of the same sources; None: `out_dir`/work.
        resolved: the input, if the caller has resolved it in `work`; None: it is listed and resolved here.
        stored: where the stages' outputs are if they run on nodes without a disk in common; None: in `work`.

    Raises UserError for a missing source, too many bad files or documents, an empty corpus, a corpus without a
    held-out document although `heldout_fraction` is positive, and a vocabulary too large for the text.
    """
    out_dir = out_dir.absolute()
    work = out_dir / "work" if work is None else work.absolute()
    run = reporting(map_items if stored is None else stored.map_items, report)
    at_hand = on_disk if stored is None else stored.at_hand

    def run_once(stage: str, function: Callable[[Any], Output], items: Sequence[Any]) -> list[Output]:
        by_key = {output.key: output for output in run(stage, function, items)}
        return [by_key[item.key] for item in items]

    make_work_folder(work)
    if resolved is None:
        resolved = resolve_inputs(data, tok, list_files(data.sources), work, map_items, report)
    make_folder(out_dir)
    beside = out_dir / _BESIDE
    for folder in (out_dir, beside):
        remove_temporaries(folder)
    standing = find_whole(out_dir, resolved.identity, map_items, report)
    if standing is not None:
        _remove_beside(beside)
        return standing

    splits = group_into_splits(resolved.files)
    read = run_once("read", read_split, [read_item(work, parts, data) for parts in splits])
    if (again := without_broken(splits, read)) != splits:
        splits = again
        read = run_once("read", read_split, [read_item(work, parts, data) for parts in splits])
    read_counts, set_aside = account(splits, read, data.max_bad_fraction)

    used, chosen, chosen_counts = choose(work, read, data, Stages(run_once, at_hand))
    sample_bytes = int(tok.sample_mb * 1e6)
    to_look = [FindCandidates(split, data.heldout_fraction, sample_bytes) for split in used]
    sample = merge(run("sample", find_candidates, to_look), sample_bytes)
    if not sample.kept:
        raise UserError(nothing_left({**read_counts, **chosen_counts}, data.holds_pairs))
    _check_heldout(sample.kept, sample.held, data.heldout_fraction)
    languages = tuple(source.language for source in data.sources)
    to_draw = used if tok.path is None or data.holds_pairs else []
    looked_at = largest_id(sample, CHECKED_BYTES)
    largest = largest_id(sample, sample_bytes) if tok.path is None else looked_at
    drawn = run_once("draw", draw_sample, [_draw_item(work, split, largest, data) for split in to_draw])
    trained = run_once("tokenizer", train_tokenizer, _tokenizer_items(work, drawn, languages, data, tok))
    contents = []
    for output in trained:
        with at_hand(output) as path:
            contents.append(path.read_bytes())
    infos = [
        tokenizer.describe(content, output.sha256, data.holds_pairs)
        for content, output in zip(contents, trained, strict=True)
    ]
    if data.holds_pairs:
        infos[1:] = [info.model_copy(update={"file": TARGET_TOKENIZER}) for info in infos[1:]]
        models = (trained[0].path, trained[-1].path)
        unknown = (infos[0].special_ids.get("unk"), infos[-1].special_ids.get("unk"))
        to_check = [CountUnknown(output.path, looked_at, models, unknown) for output in drawn]
        check_coverage(run("unknown tokens", count_unknown, to_check), tok)
    library = "sentencepiece" if infos[0].file == TOKENIZER else "tokenizers"
    to_encode = [_encode_item(work, split, trained, library, languages, data) for split in used]
    encoded = run_once("encode", encode_split, to_encode)
    plan = {split: plan_shards(encoded, split) for split in _SPLITS}
    if not plan["train"] or (data.heldout_fraction and not plan["heldout"]):
        raise UserError("the train or the held-out documents have no token; add text")

    items = [item for split in _SPLITS for item in shard_items(work, out_dir, beside, split, plan[split])]
    assembled = run_once("shards", assemble_shard, items)
    shards = [shard_entry(*made) for made in zip(items, chain(*plan.values()), assembled, strict=True)]

    info, target = infos[0], infos[-1]
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    to_count = [
        (made.path, target.vocab_size) for made, shard in zip(assembled, shards, strict=True) if shard.split == "train"
    ]
    for of_shard in run("count", count_target_tokens if data.holds_pairs else count_tokens, to_count):
        counts += of_shard
    counted = _npy(counts)

    dtype = token_dtype(max(info.vocab_size, target.vocab_size))
    separate = target if len(infos) > 1 else None
    no_tokens = sum(output.facts["no tokens"] for output in encoded)
    manifest = Manifest(
        fingerprint=data_fingerprint(
            info.sha256, dtype, shards, data.holds_pairs, None if separate is None else separate.sha256
        ),
        inputs=resolved.identity,
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
        pairs=data.holds_pairs,
        target_tokenizer=separate,
    )
    with ExitStack() as stack:
        made = {
            item.target: stack.enter_context(at_hand(output)) for item, output in zip(items, assembled, strict=True)
        }
        moves = {target: path for target, path in made.items() if str(path) != target}
        files = {each.file: content for each, content in zip(infos, contents, strict=True)}
        _commit(out_dir, manifest, moves, {**files, TOKEN_COUNTS: counted})
    keys = {output.key for output in (*read, *chosen, *drawn, *trained, *encoded, *assembled)}
    _sweep(out_dir, work, manifest, keys)
    if stored is not None:
        stored.sweep(keys)
    return manifest


def read_item(work: Path, parts: list[Part], data: DataConfig) -> ReadSplit:
    """The item of stage "read" for the parts of a split, whose files are identified."""
    settings = [data.clean.model_dump(), data.filters.model_dump()]
    key = stage_key(
        "read", [], unicodedata.unidata_version, [part_key(part) for part in parts], settings, rules_depend_on(data)
    )
    return ReadSplit(key, str(work / "read"), parts, data.clean, data.filters)


def _draw_item(work: Path, split: Kept, largest: int, data: DataConfig) -> DrawSample:
    key = stage_key("draw", [], kept_key(split), data.heldout_fraction, largest)
    return DrawSample(key, str(work / "draw"), split, data.heldout_fraction, largest)


def _tokenizer_items(
    work: Path, drawn: list[Output], languages: tuple[str, ...], data: DataConfig, tok: TokenizerConfig
) -> list[TrainTokenizer]:
    """One item, or those of the source and of the target sides of pairs."""
    folder, paths, pairs = str(work / "tokenizer"), tuple(output.path for output in drawn), data.holds_pairs
    if tok.path is not None:
        key = stage_key("tokenizer", [], existing(data, tok))
        return [TrainTokenizer(key, folder, (), 0, languages, tok, pairs)]
    depends_on = ["rounded scores", [output.sha256 for output in drawn], languages, tok.model_dump()]
    sample_bytes = sum(output.facts["bytes"] for output in drawn)
    sides: tuple[Literal["source", "target"] | None, ...] = ("source", "target") if tok.separate else (None,)

    def item(side: Literal["source", "target"] | None) -> TrainTokenizer:
        key = stage_key("tokenizer", ["sentencepiece", "sentencex"], *depends_on, *(["pairs", side] if pairs else []))
        return TrainTokenizer(key, folder, paths, sample_bytes, languages, tok, pairs, side)

    return [item(side) for side in sides]


def _encode_item(
    work: Path, split: Kept, trained: list[Output], library: str, languages: tuple[str, ...], data: DataConfig
) -> EncodeSplit:
    first, *others = trained
    depends_on = [kept_key(split), first.sha256, data.heldout_fraction, languages, unicodedata.unidata_version]
    if data.holds_pairs:
        depends_on += ["pairs", *(other.sha256 for other in others)]
    key = stage_key("encode", [library, "sentencex"], *depends_on)
    target = trained[-1].path if data.holds_pairs else None
    return EncodeSplit(key, str(work / "encode"), split, data.heldout_fraction, first.path, languages, target)


def _npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _commit(out_dir: Path, manifest: Manifest, moves: dict[str, Path], contents: dict[str, bytes]) -> None:
    """Make `manifest` and its files the data set in `out_dir`; replaces files of the same names.

    Args:
        moves: by target path, the path of a shard that is whole and synced.
        contents: by name, the content of the other files.
    """
    encode_manifest(manifest)  # before anything is replaced
    # No reader may see a manifest with files of another. A repair only replaces damaged files by equal good ones.
    if _fingerprint_of(out_dir) != manifest.fingerprint:
        (out_dir / MANIFEST).unlink(missing_ok=True)
        sync(out_dir)
    for target, made in moves.items():
        os.replace(made, target)
    for name, content in contents.items():
        write_atomically(out_dir / name, content)
    remember(out_dir, manifest)  # the stages hashed all of it
    write_manifest(out_dir, manifest)


def _remove_beside(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _fingerprint_of(out_dir: Path) -> str | None:
    try:
        return read_data_manifest(out_dir).fingerprint
    except ValueError:
        return None


def _check_heldout(documents: int, held: int, fraction: float) -> None:
    if fraction and not held:
        raise UserError(
            f"none of the {documents} documents falls into data.heldout_fraction={fraction:g}; add documents, raise it "
            f"(to about {min(0.5, 5 / documents):.2g}), or set it to 0"
        )
    if held == documents:
        raise UserError(
            f"all {documents} documents fall into data.heldout_fraction={fraction:g}; lower it, or add documents"
        )


def _sweep(out_dir: Path, work: Path, manifest: Manifest, keys: Set[str]) -> None:
    """Remove what earlier inputs, other settings and killed processes left."""
    _remove_beside(out_dir / _BESIDE)
    remove_temporaries(out_dir)
    current = {shard.file for shard in manifest.shards}
    for pattern in ("train-*.arrow", "heldout-*.arrow"):
        for path in out_dir.glob(pattern):
            if path.name not in current:
                path.unlink()
    for path in work.glob("*/*"):
        if path.stem not in keys:
            path.unlink()
