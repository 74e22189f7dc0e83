"""Make pairs for completion of the triples of a knowledge base: WordNet, ConceptNet or ATOMIC (docs/pairs.md).

    python bench/triples.py wordnet /usr/share/wordnet wordnet-triples/      # Debian's wordnet-base
    python bench/triples.py conceptnet train100k.txt.gz conceptnet-triples/  # or conceptnet-assertions-5.7.0.csv.gz
    python bench/triples.py atomic v4_atomic_all.csv atomic-triples/

The script writes:

    train.jsonl.gz, dev.jsonl.gz, test.jsonl.gz    a triple a line, with the fields head, relation and tail
    completion.yaml                                the task that scores completions of the test triples
    relations.json                                 the relations' tokens, for tokenizer.added_tokens

The triples of a head are all in the same part: of ATOMIC the official one, else 5 % of the heads are in each of dev and
test, chosen by a hash. Of two relations that are each other's inverse, as hypernym and hyponym, WordNet's triples have
one, and of a symmetric relation each pair of words once: the inverse of a test triple would give it away.
"""

import argparse
import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from multihop.common.errors import UserError
from multihop.common.files import make_folder
from multihop.data_prep.reading.raw import relation_token
from multihop.eval.tasks.task import unit_hash

PARTS = ("train", "dev", "test")
_POINTERS = {
    "@": "hypernym", "@i": "instance_of", "#m": "member_of", "#s": "substance_of", "#p": "part_of", "*": "entails",
    ">": "causes", ";c": "topic", ";r": "region", ";u": "usage", "<": "participle_of", "!": "antonym",
    "+": "derivation", "&": "similar_to", "=": "attribute", "$": "verb_group", "^": "also_see",
}  # fmt: skip
"""WordNet's pointers that are kept: of wninput(5), without the inverse ones."""
_SYMMETRIC = {"antonym", "derivation", "similar_to", "attribute", "verb_group", "also_see"}
_ATOMIC_PARTS = {"trn": "train", "dev": "dev", "tst": "test"}


class Triple(NamedTuple):
    """A fact."""

    head: str
    relation: str
    tail: str
    part: str = ""
    """The official part; "": there is none."""


class _Synset(NamedTuple):
    words: list[str]
    pointers: list[list[str]]
    """Each pointer's symbol, offset, part of speech, and hexadecimal numbers of its two words, 0000 for all."""


def read_wordnet(folder: Path) -> Iterator[Triple]:
    """Yield the triples of the data files of WordNet (wndb(5)). A pointer between whole synsets is written with the
    first word of each.

    Raises:
        UserError: a file is missing or damaged.
    """
    synsets: dict[tuple[str, str], _Synset] = {}
    for pos, name in (("n", "noun"), ("v", "verb"), ("a", "adj"), ("r", "adv")):
        path = folder / f"data.{name}"
        if not path.is_file():
            raise UserError(f"{path} is missing; give the directory of WordNet's files, as in Debian's wordnet-base")
        for number, line in enumerate(_text_lines(path), start=1):
            if not line.startswith("  "):  # the license
                try:
                    synsets[pos, line.split(" ", 1)[0]] = _synset(line)
                except (ValueError, IndexError):
                    raise UserError(f"{path}, line {number}: not a synset of wndb(5); get the file again") from None
    seen = set()
    for (pos, offset), synset in synsets.items():
        for symbol, other_offset, other_pos, words in synset.pointers:
            relation = _POINTERS.get(symbol, "pertains_to" if symbol == "\\" else "")
            other = synsets.get((other_pos, other_offset))
            if other is None:
                raise UserError(
                    f"{folder}: synset {pos} {offset} points to {other_pos} {other_offset}, which is missing"
                )
            try:
                head, tail = (each.words[max(0, int(word, 16) - 1)] for each, word in
                              ((synset, words[:2]), (other, words[2:])))  # fmt: skip
            except (ValueError, IndexError):
                raise UserError(
                    f"{folder}: synset {pos} {offset} points from and to words {words}, which are missing; get the "
                    "files again"
                ) from None
            pair = tuple(sorted((head, tail))) if relation in _SYMMETRIC else (head, tail)
            if relation and head != tail and (relation, *pair) not in seen:
                seen.add((relation, *pair))
                yield Triple(head, relation, tail)


def _synset(line: str) -> _Synset:
    fields = line.split(" | ", 1)[0].split()
    count = int(fields[3], 16)
    words = [word.partition("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
    first, pointers = 5 + 2 * count, int(fields[4 + 2 * count])
    parts = [fields[at : at + 4] for at in range(first, first + 4 * pointers, 4)]
    if len(words) != count or any(len(each) < 4 or len(each[3]) != 4 for each in parts):
        raise ValueError(line)
    return _Synset(words, [[symbol, offset, "a" if pos == "s" else pos, at] for symbol, offset, pos, at in parts])


def read_conceptnet(path: Path) -> Iterator[Triple]:
    """Yield the English triples of ConceptNet's assertions, or those of Li et al. 2016 (relation, head, tail, score),
    without the false ones of their test sets, whose score is 0.

    Raises:
        UserError: a line has neither format.
    """
    for number, line in enumerate(_text_lines(path), start=1):
        cells = line.split("\t")
        if line.startswith("/a/") and len(cells) == 5:
            _, relation, head, tail, _ = cells
            if head.startswith("/c/en/") and tail.startswith("/c/en/"):
                yield Triple(_concept(head), relation.removeprefix("/r/"), _concept(tail))
        elif len(cells) in (3, 4):
            if cells[3:] != ["0"]:
                yield Triple(cells[1], cells[0], cells[2])
        else:
            raise UserError(
                f"{path}, line {number}: expected five columns that begin with /a/, or relation, head, tail"
            )


def _concept(uri: str) -> str:
    return uri.split("/")[3].replace("_", " ")


def read_atomic(path: Path) -> Iterator[Triple]:
    """Yield the triples of ATOMIC's CSV file, in which a row has an event and for each relation a JSON list of tails.

    Raises:
        UserError: a row lacks the columns, or a cell is no JSON list of texts.
    """
    number = 1
    try:
        for row in csv.DictReader(_text_lines(path)):
            number += 1
            event, part = row["event"], _ATOMIC_PARTS[row["split"]]
            lists = {name: _texts(value) for name, value in row.items() if name and name[0] in "ox"}
            yield from (Triple(event, relation, tail, part) for relation, tails in lists.items() for tail in tails)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UserError(
            f"{path}, row {number}: expected the columns event and split, and JSON lists of texts in those of the "
            "relations"
        ) from None


def _texts(cell: str) -> list[str]:
    """Return a JSON list of texts.

    Raises:
        ValueError: it is something else.
    """
    texts = json.loads(cell)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(cell)
    return texts


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from (line.rstrip("\n") for line in file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give the official file") from None


READERS: dict[str, Callable[[Path], Iterator[Triple]]] = {
    "wordnet": read_wordnet, "conceptnet": read_conceptnet, "atomic": read_atomic
}  # fmt: skip


def part_of(head: str) -> str:
    """Return the part of a head's triples."""
    at = unit_hash(f"head\n{head}")
    return "dev" if at < 0.05 else "test" if at < 0.1 else "train"


def write_triples(triples: Iterator[Triple], out: Path) -> dict[str, Counter[str]]:
    """Write the files; returns for each part the number of triples of each relation.

    Raises:
        UserError: a triple has no head, relation or tail, or a part would have none.
    """
    make_folder(out)
    counts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    lines: dict[str, list[str]] = {part: [] for part in PARTS}
    for number, triple in enumerate(triples, start=1):
        for name, value in zip(("head", "relation", "tail"), triple, strict=False):
            if not value.strip():
                raise UserError(f"triple {number} has no {name}: {triple[:3]}; correct the file")
        part = triple.part or part_of(triple.head)
        counts[part][triple.relation] += 1
        row = dict(zip(("head", "relation", "tail"), triple, strict=False))
        lines[part].append(json.dumps(row, ensure_ascii=False) + "\n")
    if empty := [part for part in PARTS if not lines[part]]:
        raise UserError(f"the {empty[0]} part has no triple; give a file with more")
    for part in PARTS:
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
            file.write("".join(lines[part]).encode())
        (out / f"{part}.jsonl.gz").write_bytes(buffer.getvalue())
    (out / "completion.yaml").write_text(
        "kind: completion\ntest: test.jsonl.gz\ntrain: train.jsonl.gz\n"
        "fields: {source: head, relation: relation, target: tail}\nbeams: 4\nlength_penalty: 0.6\n"
    )
    relations = sorted({relation for each in counts.values() for relation in each})
    tokens = json.dumps([relation_token(relation) for relation in relations], ensure_ascii=False)
    (out / "relations.json").write_text(tokens + "\n")
    return counts


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=READERS)
    parser.add_argument("source", type=Path, help="WordNet's directory, or the file of ConceptNet or ATOMIC")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    try:
        counts = write_triples(READERS[arguments.kind](arguments.source), arguments.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'relation':16}" + "".join(f"{part:>10}" for part in PARTS))
    for relation in sorted(counts["train"], key=lambda name: -counts["train"][name]):
        print(f"{relation:16}" + "".join(f"{counts[part][relation]:>10,}" for part in PARTS))
    print(f"{'all':16}" + "".join(f"{counts[part].total():>10,}" for part in PARTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
