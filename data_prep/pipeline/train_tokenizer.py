"""Makes the tokenizers of a data set: samples documents, trains on the sample, and checks the vocabularies of pairs.

    sample          count held-out documents, find the smallest ids                       a split, hashes only
    draw            take the documents with these ids                                     a split
    tokenizer       train SentencePiece on them, or convert an existing tokenizer and     once, or each side of pairs
                    add words of them
    unknown tokens  of pairs, count unknown tokens in the sample                          a split

The sample consists of the documents with the smallest hashes. A document's hash does not depend on order or workers, so
the sample is uniform over the corpus and deterministic.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.pipeline.identity import existing_tokenizer_sha256
from multihop.data_prep.pipeline.outcomes import explain_nothing_left
from multihop.data_prep.pipeline.select_documents import Counts, selection_key
from multihop.data_prep.rules.pairs import split_sides
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.stages.documents import SCHEMA, Selection, heldout_mask, read_hashes, read_rows
from multihop.data_prep.stages.outputs import Output, read_batches, stage_key, write_batches, write_once
from multihop.data_prep.stages.runner import StageRunner
from multihop.data_prep.tokenizers.add_words import RULES, add_words
from multihop.data_prep.tokenizers.added_tokens import add_tokens
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.info import TARGET_TOKENIZER, AddedTokens, TokenizerInfo
from multihop.data_prep.tokenizers.tokenizer import describe, load
from multihop.data_prep.tokenizers.training import train

CHECKED_BYTES = 4_000_000
"""Bytes of text in which unknown tokens are counted: a second of encoding."""
MAX_UNKNOWN = 0.01
"""Maximum share of unknown tokens on a side."""

Side = Literal["source", "target"]


@dataclass(frozen=True)
class Candidates:
    """Holds candidates for the sample, of one split or several."""

    kept: int
    """Number of documents."""
    held: int
    """Number of held-out documents among them."""
    smallest: np.ndarray
    """The train documents with the smallest ids, ascending: first uint64, bytes uint32. All but the last one fit into
    the sample, so no document after it is in the sample, whatever other splits have."""


@dataclass(frozen=True)
class FindCandidates:
    """Find candidates for a sample of `sample_bytes` in a split."""

    selection: Selection
    heldout_fraction: float
    sample_bytes: int


@dataclass(frozen=True)
class DrawSample:
    """Take the train documents of a split whose id is at most `largest_id`."""

    key: str
    folder: str
    selection: Selection
    heldout_fraction: float
    largest_id: int


@dataclass(frozen=True)
class TrainTokenizer:
    """Train on the documents in `samples`, outputs of `draw_sample`, or convert the tokenizer at `config.path` and add
    words of them."""

    key: str
    folder: str
    samples: tuple[str, ...]
    sample_bytes: int
    """UTF-8 bytes of these documents."""
    languages: tuple[str, ...]
    """ISO 639 code of each source."""
    config: TokenizerConfig
    pairs: bool = False
    side: Side | None = None
    """The side of pairs to train on; None: both."""


@dataclass(frozen=True)
class CountUnknown:
    """Count unknown tokens in the pairs of a sample whose id is at most `largest_id`."""

    sample: str
    """Path of an output of `draw_sample`."""
    largest_id: int
    models: tuple[str, str]
    """Paths of the tokenizers of source and target."""
    unknown: tuple[int | None, int | None]
    """Ids of their unknown tokens; None: the tokenizer has none."""


@dataclass(frozen=True)
class PreparedTokenizers:
    """Holds the tokenizer of a data set, or those of the source and of the target sides of pairs."""

    samples: list[Output]
    outputs: list[Output]
    contents: list[bytes]
    """The bytes of the outputs' files."""
    infos: list[TokenizerInfo]

    @property
    def source(self) -> TokenizerInfo:
        return self.infos[0]

    @property
    def target(self) -> TokenizerInfo:
        """The tokenizer of the target sides, which may be `source`; of documents, `source`."""
        return self.infos[-1]


def find_all_candidates(
    selections: list[Selection], counts: Counts, data: DataConfig, tok: TokenizerConfig, runner: StageRunner
) -> Candidates:
    """Run the stage "sample" over all splits.

    Args:
        counts: numbers of documents that earlier stages kept and dropped, for the message if nothing is left.

    Raises:
        UserError: no document is left, there are no held-out ones although `heldout_fraction` is positive, or all are.
    """
    sample_bytes = _sample_bytes(tok)
    items = [FindCandidates(selection, data.heldout_fraction, sample_bytes) for selection in selections]
    candidates = merge_candidates(runner.map("sample", find_candidates, items), sample_bytes)
    if not candidates.kept:
        raise UserError(explain_nothing_left(counts, data.holds_pairs))
    _check_heldout(candidates.kept, candidates.held, data.heldout_fraction)
    return candidates


def make_tokenizers(
    work: Path,
    selections: list[Selection],
    candidates: Candidates,
    data: DataConfig,
    tok: TokenizerConfig,
    runner: StageRunner,
) -> PreparedTokenizers:
    """Run the stages "draw", "tokenizer" and, for pairs, "unknown tokens".

    Raises:
        UserError: the vocabulary does not suit the text, or an existing tokenizer cannot be used.
    """
    checked_id = largest_id(candidates, CHECKED_BYTES)
    drawn_id = largest_id(candidates, _sample_bytes(tok)) if tok.is_from_sample else checked_id
    to_draw = selections if tok.is_from_sample or data.holds_pairs else []
    samples = runner.outputs(
        "draw", draw_sample, [_draw_item(work, selection, drawn_id, data) for selection in to_draw]
    )
    # One after the other: each may take all free memory.
    items = _tokenizer_items(work, samples, data, tok)
    outputs = [output for item in items for output in runner.outputs("tokenizer", train_tokenizer, [item])]
    contents = []
    for output in outputs:
        with runner.local_file(output) as path:
            contents.append(path.read_bytes())
    infos = [
        describe(content, output.sha256, data.holds_pairs) for content, output in zip(contents, outputs, strict=True)
    ]
    if outputs[0].metadata:
        infos[0] = infos[0].model_copy(update={"added": AddedTokens.model_validate(outputs[0].metadata)})
    infos[1:] = [info.model_copy(update={"file": TARGET_TOKENIZER}) for info in infos[1:]]
    if data.holds_pairs:
        models = (outputs[0].path, outputs[-1].path)
        unknown = (infos[0].special_ids.get("unk"), infos[-1].special_ids.get("unk"))
        to_check = [CountUnknown(sample.path, checked_id, models, unknown) for sample in samples]
        check_coverage(runner.map("unknown tokens", count_unknown, to_check), tok)
    return PreparedTokenizers(samples, outputs, contents, infos)


def find_candidates(item: FindCandidates) -> Candidates:
    """Find the candidates of a split. Memory: 20 bytes per document."""
    hashes = np.delete(read_hashes(item.selection.path), item.selection.dropped)
    held = heldout_mask(hashes["second"], item.heldout_fraction)
    train = hashes[~held][["first", "bytes"]]
    return Candidates(len(hashes), int(held.sum()), _smallest(train, item.sample_bytes))


def merge_candidates(parts: Iterable[Candidates], sample_bytes: int) -> Candidates:
    """Merge the candidates of all splits, in any order. Holds at most the sample and one split's candidates."""
    merged = Candidates(0, 0, np.empty(0, dtype=[("first", "u8"), ("bytes", "u4")]))
    for part in parts:
        smallest = _smallest(np.concatenate([merged.smallest, part.smallest]), sample_bytes)
        merged = Candidates(merged.kept + part.kept, merged.held + part.held, smallest)
    return merged


def draw_sample(item: DrawSample) -> Output:
    """Write the sample's documents of a split to FOLDER/KEY.arrow."""

    def write(path: Path) -> dict[str, Any]:
        hashes = read_hashes(item.selection.path)
        held = heldout_mask(hashes["second"], item.heldout_fraction)
        chosen = (hashes["first"] <= np.uint64(item.largest_id)) & ~held
        chosen[item.selection.dropped] = False
        write_batches(path, SCHEMA, read_rows(item.selection.path, np.flatnonzero(chosen)), "lz4")
        return {"documents": int(chosen.sum()), "bytes": int(hashes["bytes"][chosen].sum(dtype=np.int64))}

    folder = Path(item.folder)
    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def read_sample(samples: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the sample's texts, each with the index of its source, sorted by id, so that splits do not matter.

    Holds all of them in memory.
    """
    batches = [batch for path in samples for batch in read_batches(path)]
    documents = pa.Table.from_batches(batches, SCHEMA).sort_by([("first", "ascending"), ("second", "ascending")])
    for batch in documents.to_batches(max_chunksize=1024):
        yield from zip(batch.column("text").to_pylist(), batch.column("source").to_pylist(), strict=True)


def largest_id(candidates: Candidates, sample_bytes: int) -> int:
    """Return the largest id in the sample, which has as many documents as fit, and at least one."""
    fitting = np.searchsorted(np.cumsum(candidates.smallest["bytes"], dtype=np.int64), sample_bytes, side="right")
    return int(candidates.smallest["first"][max(1, int(fitting)) - 1])


def train_tokenizer(item: TrainTokenizer) -> Output:
    """Write the tokenizer, trained, converted or with added words, to FOLDER/KEY.model.

    Raises:
        UserError: as `train`, `import_tokenizer` and `add_words`.
    """

    def sentences() -> Iterator[str]:
        for text, source in read_sample(item.samples):
            if not item.pairs:
                yield from split_sentences(text, item.languages[source])
                continue
            sides = split_sides(text)
            yield from sides if item.side is None else sides[item.side == "target" :][:1]

    def write(path: Path) -> dict[str, Any]:
        config = item.config
        if config.path is None:
            path.write_bytes(train(sentences(), config, item.sample_bytes))
            return {}
        content = import_tokenizer(config.path, config.lowercase, item.pairs)
        if config.added_tokens:
            extended, added = add_tokens(content, config.added_tokens, config.path)
            path.write_bytes(extended)
            return added.model_dump()
        if not config.add_words:
            path.write_bytes(content)
            return {}
        extended, added = add_words(content, (text for text, _ in read_sample(item.samples)), config.add_words)
        path.write_bytes(extended)
        return added.model_dump()

    folder = Path(item.folder)
    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.model", write)


def count_unknown(item: CountUnknown) -> np.ndarray:
    """Return int64 (2, 2): for source and target the number of unknown tokens, and of all tokens."""
    tokenizers = [load(path) for path in dict.fromkeys(item.models)]
    counts = np.zeros((2, 2), np.int64)
    for batch in read_batches(item.sample):
        chosen = batch.column("first").to_numpy() <= np.uint64(item.largest_id)
        texts = batch.column("text").to_pylist()
        pairs = [split_sides(texts[row]) for row in np.flatnonzero(chosen).tolist()]
        for side in (0, 1):
            ids, _ = tokenizers[-1 if side else 0].encode([pair[side] for pair in pairs])
            unknown = item.unknown[side]
            counts[side] += 0 if unknown is None else int((ids == unknown).sum()), len(ids)
    return counts


def check_coverage(counts: Iterable[np.ndarray], tok: TokenizerConfig) -> None:
    """Check the results of `count_unknown`, on a sample and before anything is encoded.

    Raises:
        UserError: more than MAX_UNKNOWN of a side's tokens are unknown.
    """
    total = sum(counts, np.zeros((2, 2), np.int64))
    for side, (unknown, tokens) in zip(("source", "target"), total.tolist(), strict=True):
        if unknown > MAX_UNKNOWN * tokens:
            whose = "the trained tokenizer" if tok.path is None else f"tokenizer.path={tok.path}"
            instead = "set tokenizer.byte_fallback=true" if tok.path is None else "give one that has its script"
            raise UserError(
                f"{unknown / tokens:.1%} of the {side} side's tokens are unknown to {whose}, at most "
                f"{MAX_UNKNOWN:.0%} can be; {instead}, or correct the texts"
            )


def _sample_bytes(tok: TokenizerConfig) -> int:
    return int(tok.sample_mb * 1e6)


def _smallest(documents: np.ndarray, sample_bytes: int) -> np.ndarray:
    """Return the documents with the smallest ids that fit, and the first one that does not."""
    documents = documents[np.argsort(documents["first"], kind="stable")]
    fitting = np.searchsorted(np.cumsum(documents["bytes"], dtype=np.int64), sample_bytes, side="right")
    return documents[: fitting + 1]


def _check_heldout(documents: int, held: int, fraction: float) -> None:
    if fraction and not held:
        raise UserError(
            f"none of the {documents} documents falls into data.heldout_fraction={fraction:g}; add documents, or raise "
            f"it (to about {min(0.5, 5 / documents):.2g})"
        )
    if held == documents:
        raise UserError(
            f"all {documents} documents fall into data.heldout_fraction={fraction:g}; lower it, or add documents"
        )


def _draw_item(work: Path, selection: Selection, largest: int, data: DataConfig) -> DrawSample:
    key = stage_key("draw", [], selection_key(selection), data.heldout_fraction, largest)
    return DrawSample(key, str(work / "draw"), selection, data.heldout_fraction, largest)


def _tokenizer_items(work: Path, samples: list[Output], data: DataConfig, tok: TokenizerConfig) -> list[TrainTokenizer]:
    """Return one item, or those of the source and of the target sides of pairs."""
    folder, paths, pairs = str(work / "tokenizer"), tuple(output.path for output in samples), data.holds_pairs
    languages = tuple(source.language for source in data.sources)
    if tok.path is not None:
        existing = existing_tokenizer_sha256(data, tok)
        # The task may run in another directory, and only on this node if the path says where the file is.
        tok = tok.model_copy(update={"path": os.path.abspath(tok.path)})
        if not tok.add_words:
            added = [["added tokens", tok.added_tokens]] if tok.added_tokens else []
            key = stage_key("tokenizer", ["sentencepiece"] if added else [], existing, *added)
            return [TrainTokenizer(key, folder, (), 0, languages, tok, pairs)]
        chosen_by = [[output.sha256 for output in samples], tok.add_words, RULES]
        key = stage_key("tokenizer", ["sentencepiece", "tokenizers"], existing, *chosen_by)
        return [TrainTokenizer(key, folder, paths, 0, languages, tok)]
    depends_on = ["rounded scores", [output.sha256 for output in samples], languages, tok.model_dump()]
    sample_bytes = sum(output.metadata["bytes"] for output in samples)
    sides: tuple[Side | None, ...] = ("source", "target") if tok.separate_vocabularies else (None,)

    def item(side: Side | None) -> TrainTokenizer:
        key = stage_key("tokenizer", ["sentencepiece", "sentencex"], *depends_on, *(["pairs", side] if pairs else []))
        return TrainTokenizer(key, folder, paths, sample_bytes, languages, tok, pairs, side)

    return [item(side) for side in sides]
