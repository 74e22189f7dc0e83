"""Finds, counts and removes what training documents share with evaluation texts.

    evaluation_ngrams      hashes of all n-grams of the evaluation texts, sorted              once
    find_overlaps          where a split's documents contain one of them                      a split
    find_common            n-grams in so many documents that they count as common phrases     once
    decontaminate_split    what is left of the documents that contain others                  a split

The documents of `contaminated_rows` are dropped; the fragments that `decontaminate_split` leaves of them become
documents, in a file like that of a read split. N-grams are of words as in `multihop.data_prep.duplicates.shingles`:
case, punctuation and line breaks make no difference. Evaluation texts are cleaned in the same way as the documents.
"""

import glob
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from multihop.common.errors import UserError
from multihop.data_prep.config import C4, CleanConfig, DecontaminateConfig
from multihop.data_prep.duplicates.shingles import ngrams, read_words
from multihop.data_prep.duplicates.signature_files import kept_rows
from multihop.data_prep.rules import c4
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.stages.documents import SCHEMA, content_hash, read_documents
from multihop.data_prep.stages.outputs import Output, read_batches, write_batches, write_once

RULES = 2
"""Version of the rules, increased when they find other documents or leave other fragments: older data sets are then
prepared again."""
MIN_WORDS = 8
"""A shorter evaluation text has no n-gram: too many documents would contain it by chance (GPT-3's smallest n)."""
WINDOW = 200
"""Characters cut on both sides of an overlap, and the least characters of a fragment (Brown et al. 2020, app. C)."""
MAX_FRAGMENTS = 10
"""A document cut into more fragments is dropped (Brown et al. 2020, appendix C)."""

_NGRAMS = pa.schema([pa.field("words", pa.uint8()), pa.field("hash", pa.uint64()), pa.field("set", pa.uint16())])
_OVERLAPS = pa.schema([pa.field(name, pa.uint32()) for name in ("row", "entry", "start", "stop")])
_TEXTS_AT_ONCE = 10_000
_NAMED_PER_SPLIT = 20


@dataclass(frozen=True)
class EvaluationNgrams:
    """Write the n-grams of files, {name of the set: path}, into one table: FOLDER/KEY.arrow."""

    key: str
    folder: str
    sets: dict[str, str]
    config: DecontaminateConfig
    clean: CleanConfig
    """The cleaning of the documents."""
    edits: C4 | None
    """The edits of the documents after cleaning."""


@dataclass(frozen=True)
class FindOverlaps:
    """Look for the table's n-grams in the documents of a split that are not `dropped`: FOLDER/KEY.arrow."""

    key: str
    folder: str
    path: str
    dropped: np.ndarray
    """int64, ascending: dropped rows of the split."""
    table: str


@dataclass(frozen=True)
class FindCommon:
    """Find the n-grams of more than `common` documents of all splits: FOLDER/KEY.npy."""

    key: str
    folder: str
    overlaps: list[str]
    common: int | None


@dataclass(frozen=True)
class DecontaminateSplit:
    """Write what is left of a split's contaminated documents: FOLDER/KEY.arrow."""

    key: str
    folder: str
    path: str
    overlaps: str
    common: str
    table: str
    sets: list[str]
    """The names of the sets, in the order of `EvaluationNgrams.sets`."""
    action: Literal["drop", "cut"]


def evaluation_sets(config: DecontaminateConfig) -> dict[str, str]:
    """Return the evaluation files, {name: path} by name; a name is the shortest end of the path that is unique.

    Raises:
        UserError: a pattern matches no file, or a file is of an unknown kind.
    """
    paths = set()
    for pattern in config.against:
        matches = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not matches:
            raise UserError(f"data.decontaminate.against={pattern} matches no file; correct or remove it")
        paths |= {str(Path(path).absolute()) for path in matches}
    for path in paths:
        if Path(path).suffix not in (".txt", ".jsonl"):
            raise UserError(
                f"data.decontaminate.against matches {path}, expected .jsonl, or .txt with one text per line"
            )
    for depth in range(1, 1 + max(len(Path(path).parts) for path in paths)):
        names = {"/".join(Path(path).with_suffix("").parts[-depth:]): path for path in sorted(paths)}
        if len(names) == len(paths):
            return dict(sorted(names.items()))
    return {path: path for path in sorted(paths)}  # only their suffixes differ


def evaluation_ngrams(item: EvaluationNgrams) -> Output:
    """Write the table: for each n-gram and set a row of "words" (n), "hash" and "set", sorted.

    A text contributes the n-grams of every form that it may have in a document (see `_make_forms`). A text of fewer
    than `ngram` words is one n-gram, if it has at least MIN_WORDS. Memory: about 50 bytes per n-gram. Metadata: for
    each set "texts", and "too short", the texts without an n-gram.

    Raises:
        UserError: a line is not JSON or lacks the field, or a set has no text.
    """
    folder = Path(item.folder)
    least = min(MIN_WORDS, item.config.ngram)
    forms_of = _make_forms(item.clean, item.edits)

    def write(path: Path) -> dict[str, Any]:
        metadata, tables = {}, [np.empty(0, _TABLE_ROW)]
        for number, (name, source) in enumerate(item.sets.items()):
            metadata[name] = {"texts": 0, "too short": 0}
            for texts in _evaluation_texts(source, item.config.field):
                forms = [forms_of(text) for text in texts]
                owners = np.repeat(np.arange(len(texts)), [len(some) for some in forms])
                long_enough = np.zeros(len(texts), dtype=bool)
                cleaned = pa.array(list(chain.from_iterable(forms)), pa.string())
                for words in read_words(cleaned, carried=item.config.ngram - 1):
                    grams = ngrams(words, item.config.ngram)
                    rows = np.empty(len(grams.hashes), _TABLE_ROW)
                    rows["words"], rows["hash"], rows["set"] = grams.last - grams.first, grams.hashes, number
                    taken = rows["words"] >= least
                    long_enough[owners[grams.documents[taken] + words.first_document]] = True
                    tables.append(np.unique(rows[taken]))
                metadata[name]["texts"] += len(texts)
                metadata[name]["too short"] += int((~long_enough).sum())
            if not metadata[name]["texts"]:
                raise UserError(
                    f"{source} has no text; add evaluation texts, or remove it from data.decontaminate.against"
                )
        table = np.unique(np.concatenate(tables))
        columns = [pa.array(np.ascontiguousarray(table[name])) for name in _NGRAMS.names]
        write_batches(path, _NGRAMS, iter([pa.RecordBatch.from_arrays(columns, schema=_NGRAMS)]), None)
        return metadata

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def find_overlaps(item: FindOverlaps) -> Output:
    """Find every occurrence in a split of an n-gram of the table.

    The output has the row in the split, the entry (row of the table), start and stop in bytes of the document's UTF-8,
    sorted by row and start. Memory: 13 to 80 bytes per row of the table, and that of `read_words`. Metadata:
    "documents" with an occurrence.

    Only 64-bit hashes are compared: with 2^40 n-grams in the documents and 2^24 in the table, 2^(40 + 24 - 64) = 1
    false occurrence is expected in the whole corpus.
    """
    folder = Path(item.folder)
    lookups = _lookups(item.table)

    def overlaps(metadata: dict[str, int]) -> Iterator[pa.RecordBatch]:
        seen = 0
        for batch in read_documents(item.path, item.dropped):
            rows = kept_rows(item.dropped, seen, seen + batch.num_rows)
            seen += batch.num_rows
            parts = [np.empty((4, 0), np.int64)]
            for words in read_words(batch.column("text"), carried=max(lookups, default=1) - 1):
                for length, lookup in lookups.items():
                    grams = ngrams(words, length)
                    at, entries = lookup.find(grams.hashes)
                    documents, first, last = grams.documents[at], grams.first[at], grams.last[at] - 1
                    of = rows[documents + words.first_document]
                    spans = words.starts[first], words.stops[last]
                    parts.append(np.stack([of, entries, *(span - words.origins[documents] for span in spans)]))
            # The parts of a long document overlap: an occurrence in the overlap is found twice.
            occurrences = np.unique(np.concatenate(parts, axis=1)[[0, 2, 3, 1]], axis=1)[[0, 3, 1, 2]].astype(np.uint32)
            metadata["documents"] += len(np.unique(occurrences[0]))
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in occurrences], schema=_OVERLAPS)

    def write(path: Path) -> dict[str, Any]:
        metadata = {"documents": 0}
        write_batches(path, _OVERLAPS, overlaps(metadata), "lz4")
        return metadata

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def find_common(item: FindCommon) -> Output:
    """Write uint32, ascending: entries of the table that occur in more than `common` documents; empty if it is None.

    GPT-3 ignored 13-grams of more than 10 training documents: most were phrases and boilerplate (Brown et al. 2020,
    appendix C). Memory: 8 bytes per row of the table. Metadata: "found" and "common" n-grams.
    """
    folder = Path(item.folder)

    def write(path: Path) -> dict[str, Any]:
        documents = np.zeros(0, np.int64)
        for source in item.overlaps:
            for batch in read_batches(source):
                row, entry = (batch.column(name).to_numpy().astype(np.int64) for name in ("row", "entry"))
                of_batch = np.bincount(np.unique(row << 32 | entry) & 0xFFFFFFFF, minlength=len(documents))
                of_batch[: len(documents)] += documents
                documents = of_batch
        limit = np.inf if item.common is None else item.common
        common = np.flatnonzero(documents > limit).astype(np.uint32)
        with open(path, "wb") as file:
            np.save(file, common, allow_pickle=False)
        return {"found": int((documents > 0).sum()), "common": len(common)}

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.npy", write)


def contaminated_rows(overlaps: str, common: str) -> np.ndarray:
    """Return int64, ascending: the rows of a split that contain an uncommon n-gram of an evaluation text."""
    return np.unique(_uncommon(overlaps, common)["row"]).astype(np.int64)


def decontaminate_split(item: DecontaminateSplit) -> Output:
    """Write what is left of the contaminated documents, as new documents, in an Arrow file like `read_split`'s.

    Fragments may be copies or near duplicates of each other and of other documents. Action "drop" leaves none. Action
    "cut" removes overlaps with WINDOW characters on both sides; fragments of
    less than WINDOW characters are dropped, and all fragments of a document with more than MAX_FRAGMENTS (Brown et al.
    2020, appendix C). Metadata: "documents" contaminated, "sets" {name: documents}, "pieces", the fragments left,
    "named": the first documents, each with its id, a set's name and the shared words.
    """
    folder = Path(item.folder)

    def fragments(metadata: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        overlaps = _uncommon(item.overlaps, item.common)
        rows, starts = np.unique(overlaps["row"], return_index=True)
        metadata["documents"] = len(rows)
        of_document = dict(zip(rows.tolist(), np.split(overlaps, starts[1:]), strict=False))
        table = pa.ipc.open_file(pa.memory_map(item.table)).get_batch(0)
        words, hashes, numbers = (table.column(name).to_numpy() for name in _NGRAMS.names)
        start, sets = 0, Counter[str]()
        for batch in read_batches(item.path):
            left = []
            for row in rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + batch.num_rows)].tolist():
                text, spans = batch.column("text")[row - start].as_py(), of_document[row]
                names = _sets_of(spans["entry"], words, hashes, numbers)
                sets.update(item.sets[number] for number in names)
                if len(metadata["named"]) < _NAMED_PER_SPLIT:
                    shared = text.encode()[spans["start"][0] : spans["stop"][0]].decode(errors="replace")
                    metadata["named"].append([batch.column("first")[row - start].as_py(), item.sets[names[0]], shared])
                if item.action == "cut":
                    second, source = (batch.column(name)[row - start].as_py() for name in ("second", "source"))
                    left += [
                        (content_hash(fragment)[0], second, len(fragment.encode()), source, fragment)
                        for fragment in cut(text, spans)
                    ]
            if left:
                metadata["pieces"] += len(left)
                columns = zip(zip(*left, strict=True), SCHEMA, strict=True)
                yield pa.RecordBatch.from_arrays(
                    [pa.array(values, kind.type) for values, kind in columns], schema=SCHEMA
                )
            start += batch.num_rows
        metadata["sets"] = dict(sets)

    def write(path: Path) -> dict[str, Any]:
        metadata: dict[str, Any] = {"pieces": 0, "named": []}
        write_batches(path, SCHEMA, fragments(metadata), "lz4")
        return metadata

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def cut(text: str, spans: np.ndarray) -> list[str]:
    """Cut the overlaps out of `text`, and return the fragments that are kept, stripped.

    Args:
        spans: "start" and "stop" of the overlaps, in bytes of the text's UTF-8, sorted by start.
    """
    data = text.encode()
    fragments: list[str] = []
    end = 0  # of the last removed span
    for start, stop in zip(spans["start"].tolist(), spans["stop"].tolist(), strict=True):
        before, after = (
            data[max(0, start - 4 * WINDOW) : start].decode(errors="ignore")[-WINDOW:],
            data[stop : stop + 4 * WINDOW].decode(errors="ignore")[:WINDOW],
        )
        begin = start - len(before.encode())
        if begin > end or not fragments:
            fragments.append(data[end : max(begin, end)].decode(errors="ignore"))
        end = max(end, stop + len(after.encode()))
    fragments.append(data[end:].decode(errors="ignore"))
    fragments = [fragment.strip() for fragment in fragments]
    return (
        [fragment for fragment in fragments if len(fragment) >= WINDOW]
        if sum(map(bool, fragments)) <= MAX_FRAGMENTS
        else []
    )


_TABLE_ROW = np.dtype([("words", "u1"), ("hash", "<u8"), ("set", "<u2")])
_OVERLAP = np.dtype([(name, "<u4") for name in ("row", "entry", "start", "stop")])


class _Lookup:
    """Finds hashes among sorted ones; most are absent, which one access to a table of bits shows."""

    def __init__(self, hashes: np.ndarray, first_entry: int) -> None:
        bits = min(26, max(10, (16 * len(hashes)).bit_length()))
        self.hashes, self.first_entry, self.shift = hashes, first_entry, np.uint64(64 - bits)
        self.is_present = np.zeros(2**bits, dtype=bool)
        self.is_present[hashes >> self.shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of those `hashes` that are present, and the first entry of each."""
        at = np.flatnonzero(self.is_present[hashes >> self.shift])
        entries = np.searchsorted(self.hashes, hashes[at])
        same = self.hashes[np.minimum(entries, len(self.hashes) - 1)] == hashes[at]
        return at[same], entries[same] + self.first_entry


def _lookups(path: str) -> dict[int, _Lookup]:
    """Return the hashes of n-grams, by n."""
    table = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
    words, hashes = (table.column(name).to_numpy() for name in ("words", "hash"))
    lengths, starts = np.unique(words, return_index=True)
    parts = np.split(hashes, starts[1:])
    return {
        length: _Lookup(part, start)
        for length, start, part in zip(lengths.tolist(), starts.tolist(), parts, strict=False)
    }


def _sets_of(entries: np.ndarray, words: np.ndarray, hashes: np.ndarray, sets: np.ndarray) -> list[int]:
    """Return the numbers of the sets that contain one of the entries; the entries of an n-gram are adjacent."""
    numbers: set[int] = set()
    entries = np.unique(entries)
    while len(entries):
        numbers |= set(sets[entries].tolist())
        entries = entries[entries + 1 < len(sets)]
        entries = entries[(hashes[entries + 1] == hashes[entries]) & (words[entries + 1] == words[entries])] + 1
    return sorted(numbers)


def _uncommon(overlaps: str, common: str) -> np.ndarray:
    """Read a structured array of row, entry, start and stop: the overlaps with uncommon n-grams."""
    ignored = np.load(common, allow_pickle=False)
    parts = [np.empty(0, _OVERLAP)]
    for batch in read_batches(overlaps):
        part = np.empty(batch.num_rows, _OVERLAP)
        for name in _OVERLAP.names or ():
            part[name] = batch.column(name).to_numpy()
        parts.append(part[~np.isin(part["entry"], ignored)])
    return np.concatenate(parts)


def _make_forms(cleaning: CleanConfig, edits: C4 | None) -> Callable[[str], list[str]]:
    """Make a function that maps an evaluation text to the forms that it may have within documents.

    A document is cleaned and edited as a whole: whether the repair of mojibake or the removal of a line affects the
    text depends on its surroundings, so there is a form with and without each of them.
    """
    edit = None if edits is None else c4.make_editor(edits)

    def forms(text: str) -> list[str]:
        text = text.encode(errors="replace").decode()  # JSON can contain a lone surrogate
        variants = [clean(text), *([clean(text, fix_mojibake=True)] if cleaning.fix_mojibake else [])]
        if edit is not None:
            variants += [edit(each) for each in variants]
        return list(dict.fromkeys(variants))

    return forms


def _evaluation_texts(path: str, field: str | list[str]) -> Iterator[list[str]]:
    fields = [field] if isinstance(field, str) else field
    texts: list[str] = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            if path.endswith(".jsonl"):
                texts += [_field(line, name, f"{path}, line {number}") for name in fields]
            else:
                texts.append(line)
            if len(texts) >= _TEXTS_AT_ONCE:
                yield texts
                texts = []
    if texts:
        yield texts


def _field(line: str, field: str, where: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, TypeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise UserError(
            f"{where} is not a JSON object with a text in {field!r}; correct it or data.decontaminate.field"
        )
    return text
