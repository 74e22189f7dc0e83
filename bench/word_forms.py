"""Make pairs of inflected words and their lemmas from WordNet's exception lists, spelled as characters.

    python bench/word_forms.py /usr/share/wordnet word-forms/      # Debian's wordnet-base

The script writes:

    train.jsonl.gz, dev.jsonl.gz, test.jsonl.gz    a pair a line, with the fields form and lemma
    lemmas.yaml, lemmas-greedy.yaml                the tasks that score the lemmas of the test forms

The forms of a lemma are all in the same part: 10 % of the lemmas in each of dev and test, chosen by a hash. Forms with
several lemmas, as "best" of good and well, are left out. A lemma that is too long for its form has no alignment in
connectionist temporal classification; such pairs are left out, so that models of all kinds can be trained on the same
ones (recipes/experiments/monotonic.yaml).
"""

import argparse
import gzip
import io
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from multihop.common.errors import UserError
from multihop.common.files import make_folder
from multihop.eval.tasks.task import unit_hash
from multihop.pretrain.objectives.ctc import min_states

FILES = ("noun.exc", "verb.exc", "adj.exc", "adv.exc")
Pair = tuple[str, str]


def read_word_forms(folder: Path) -> list[Pair]:
    """Return the different pairs of an inflected form and its lemma, without those that are equal (wndb(5)), and
    without forms of several lemmas, of which a test could ask for one and the training have taught another.

    Raises:
        UserError: a file is missing or damaged.
    """
    pairs: dict[Pair, None] = {}
    for name in FILES:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing; give the directory of WordNet's files, as in Debian's wordnet-base")
        for number, line in enumerate(_lines(path), start=1):
            form, *lemmas = (word.replace("_", " ") for word in line.split())
            if not lemmas:
                raise UserError(f"{path}, line {number}: expected a form and its lemma, got {line[:80]!r}")
            pairs |= {(form, lemma): None for lemma in lemmas if lemma != form}
    lemmas_of = Counter(form for form, _ in pairs)
    return [(form, lemma) for form, lemma in pairs if lemmas_of[form] == 1]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); get the file again") from None


def is_alignable(form: str, lemma: str) -> bool:
    """Return whether a form, with its end token, has as many tokens of characters as its lemma needs states."""
    return min_states(np.array([ord(letter) for letter in lemma])) <= len(form) + 1


def part_of(lemma: str) -> str:
    """Return the part of a lemma's forms."""
    at = unit_hash(f"lemma\n{lemma}")
    return "dev" if at < 0.1 else "test" if at < 0.2 else "train"


def write_pairs(pairs: list[Pair], out: Path) -> dict[str, int]:
    """Write the files; returns the number of pairs of each part."""
    make_folder(out)
    lines: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for form, lemma in pairs:
        lines[part_of(lemma)].append(json.dumps({"form": form, "lemma": lemma}) + "\n")
    for part, texts in lines.items():
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
            file.write("".join(texts).encode())
        (out / f"{part}.jsonl.gz").write_bytes(buffer.getvalue())
    task = "kind: translation\ntest: test.jsonl.gz\nfields: {source: form, target: lemma}\nmetric: exact match\n"
    (out / "lemmas.yaml").write_text(f"{task}beams: 8\nlength_penalty: 0.0\n")
    (out / "lemmas-greedy.yaml").write_text(f"{task}beams: 1\nlength_penalty: 0.0\n")
    return {part: len(texts) for part, texts in lines.items()}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="WordNet's directory")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    try:
        pairs = read_word_forms(arguments.source)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    alignable = [pair for pair in pairs if is_alignable(*pair)]
    counts = write_pairs(alignable, arguments.out)
    print(f"{len(pairs):,} pairs, {len(pairs) - len(alignable):,} of them with a lemma that is too long")
    print(", ".join(f"{count:,} {part}" for part, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
