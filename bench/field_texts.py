"""Make texts of a field and other texts for recipes/experiments/continue.yaml, with tasks on learning and forgetting.

    python bench/field_texts.py rfcs/ reviews/ field-texts/

`rfcs/` and `reviews/` hold .jsonl or .jsonl.gz files with a field `text`, a paragraph a line: RFCs
(https://www.rfc-editor.org) and film reviews. The script writes:

    field.jsonl.gz, other.jsonl.gz               texts to train on
    unseen-field.jsonl, unseen-other.jsonl       held-out paragraphs, which are in no document to train on
    unseen-field.yaml, unseen-other.yaml         the tasks that measure perplexity on them
    topics-train.jsonl, topics-test.jsonl        paragraphs of RFCs, and which of eight protocols the RFC is about
    topics.yaml                                  the task that classifies them
    counts.json                                  counts of all these

A paragraph of a topic names none of the eight. Those of the test set are from documents that are not trained on, those
of the training set are from other documents. To which set a document belongs depends on its text alone.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from noisy_texts import read_texts, zipped_lines

from multihop.common.counter_rng import key_of

PROTOCOLS = ("SIP", "IPv6", "TLS", "SNMP", "MPLS", "DNS", "SMTP", "BGP")
_NAMED = re.compile(rf"\b({'|'.join(PROTOCOLS)})(?:v\d|s)?\b", re.IGNORECASE)
_LEAST_NAMED = 10
"""Minimum number of times that a document names its protocol, which must also be twice as often as any other."""
_UNSEEN = 0.15
"""Share of the documents that are held out."""
_PARAGRAPH_WORDS = (40, 120)
_OF_DOCUMENT = 6
"""Maximum number of paragraphs of a document, so that none dominates a test."""


def main() -> None:
    """Write the files and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("field", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=10_000, help="that are taken of each, at most")
    parser.add_argument("--unseen", type=int, default=40, help="paragraphs of each perplexity")
    parser.add_argument("--examples", type=int, default=1000, help="of the topics, for training and for the test each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    topics: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for name in ("field", "other"):
        unseen: list[list[str]] = []
        seen: set[str] = set()
        with zipped_lines(options.out / f"{name}.jsonl.gz") as lines:
            for text in read_texts(getattr(options, name), options.documents):
                is_heldout = key_of("field texts", text) / 2**64 < _UNSEEN
                paragraphs = paragraphs_of(text)
                if is_heldout:
                    unseen.append(paragraphs)
                else:
                    lines.write(_line({"text": text}))
                    seen.update(paragraphs)
                counts[f"{name}: documents {'held out' if is_heldout else 'to train on'}"] += 1
                if name == "field" and (topic := topic_of(text)) is not None:
                    examples = [each for each in paragraphs if not _NAMED.search(each)][:_OF_DOCUMENT]
                    topics["test" if is_heldout else "train"] += [{"text": each, "topic": topic} for each in examples]
        # Boilerplate is in many documents.
        new = {next((each for each in paragraphs if each not in seen), "") for paragraphs in unseen} - {""}
        if not new:
            raise SystemExit(f"{getattr(options, name)} has no held-out paragraph; its texts need a paragraph a line")
        _write(
            options.out / f"unseen-{name}.jsonl", [{"text": each} for each in _first_by_hash([*new], options.unseen)]
        )
        task = f"kind: perplexity\ntest: unseen-{name}.jsonl\nfields: {{text: text}}\n"
        (options.out / f"unseen-{name}.yaml").write_text(task)
    of_training = {example["text"] for example in topics["train"]}
    topics["test"] = [example for example in topics["test"] if example["text"] not in of_training]
    for part, examples in topics.items():
        by_text = {example["text"]: example for example in examples}
        chosen = [by_text[text] for text in _first_by_hash([*by_text], options.examples)]
        _write(options.out / f"topics-{part}.jsonl", chosen)
        counts |= Counter(f"topics, {part}: {example['topic']}" for example in chosen)
    (options.out / "topics.yaml").write_text(
        "kind: classification\ntrain: topics-train.jsonl\ntest: topics-test.jsonl\nfields: {text: text, label: topic}\n"
    )
    (options.out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts, indent=1))


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs of a suitable length, in an order that depends on the text alone."""
    least, most = _PARAGRAPH_WORDS
    return _first_by_hash([each for each in text.split("\n") if least <= len(each.split()) <= most], len(text))


def topic_of(text: str) -> str | None:
    """Return the protocol that a document names most, if one stands out."""
    named = Counter(match[1].lower() for match in _NAMED.finditer(text))
    (first, count), (_, next_count) = [*named.most_common(2), ("", 0), ("", 0)][:2]
    if count < _LEAST_NAMED or count < 2 * next_count:
        return None
    return next(protocol for protocol in PROTOCOLS if protocol.lower() == first)


def _first_by_hash(texts: Sequence[str], count: int) -> list[str]:
    return sorted(texts, key=lambda text: key_of("field texts, order", text))[:count]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(map(_line, rows)), encoding="utf-8")


def _line(row: dict[str, str]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
