"""Counts what was read and what was set aside and why; refuses too much of the latter."""

import dataclasses
from collections import Counter

from data_prep.dataset.manifest import SetAside
from data_prep.reading.sources import Part
from data_prep.stages.outputs import Output

NAMED_PER_FILE = 20


def account(
    splits: list[list[Part]], read: list[Output], max_bad_fraction: float
) -> tuple[dict[str, dict[str, int]], list[SetAside]]:
    """Counts by stage and outcome ("kept" or a reason), and the bad files and documents.

    `read` are the outputs of `documents.read_split` for `splits`. Raises ValueError when the share of bad files or of
    bad documents exceeds `max_bad_fraction`.
    """
    counts: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    set_aside: list[SetAside] = []
    bad_documents = 0
    places_before: Counter[tuple[int, str]] = Counter()
    named: Counter[tuple[int, str]] = Counter()
    files, broken = set(), set()
    for parts, output in zip(splits, read, strict=True):
        for part, facts in zip(parts, output.facts["parts"], strict=True):
            name = part.file.name
            file = (part.file.source, name)
            files.add(file)
            counts["kept"] += facts["documents"]
            if facts["unreadable"] and file not in broken:
                broken.add(file)
                counts[facts["unreadable"]] += 1
                set_aside.append(SetAside(path=name, reason=facts["unreadable"]))
            filtered.update(facts["filtered"])
            for reason, number in facts["bad"].items():
                bad_documents += number
                counts[reason] += number
            for place, reason in facts["named"]:
                if named[file] < NAMED_PER_FILE:
                    named[file] += 1
                    where = (
                        name
                        if part.file.documents == "file" and part.file.format == "txt"
                        else f"{name}:{place + places_before[file]}"
                    )
                    set_aside.append(SetAside(path=where, reason=reason))
            places_before[file] += facts["places"]
    unfiltered = counts["kept"] + filtered.total()
    is_pairs = any(part.file.holds_pairs for parts in splits[:1] for part in parts)
    for what, bad, total in (
        ("files", len(broken), len(files)),
        ("pairs" if is_pairs else "documents", bad_documents, bad_documents + unfiltered),
    ):
        if bad > max_bad_fraction * total:
            examples = "; ".join(f"{some.path}: {some.reason}" for some in set_aside[:3])
            raise ValueError(
                f"{bad} of {total} {what} cannot be used, more than data.max_bad_fraction={max_bad_fraction:g} allows "
                f"({examples}); repair or remove them, or raise it"
            )
    return {"read": {**counts, "kept": unfiltered}, "filter": {"kept": counts["kept"], **filtered}}, set_aside


def without_broken(splits: list[list[Part]], read: list[Output]) -> list[list[Part]]:
    """`splits`, in which all parts of a file have its problem if the file was cut and is unreadable in one part.

    Nothing of a broken file is used, even if its other parts were read.
    """
    broken = {
        part.file.path: facts["unreadable"]
        for parts, output in zip(splits, read, strict=True)
        for part, facts in zip(parts, output.facts["parts"], strict=True)
        if facts["unreadable"] and part.stop - part.start < part.file.size
    }

    def marked(part: Part) -> Part:
        if part.file.path not in broken:
            return part
        return dataclasses.replace(part, file=dataclasses.replace(part.file, problem=broken[part.file.path]))

    return [[marked(part) for part in parts] for parts in splits]
