"""What was not used and why, and whether that is too much."""

import dataclasses
from collections import Counter

from data_prep.manifest import SetAside
from data_prep.reading.sources import Part
from data_prep.stages import Output

NAMED_PER_FILE = 20


def account(
    splits: list[list[Part]], read: list[Output], max_bad_fraction: float
) -> tuple[dict[str, dict[str, int]], list[SetAside]]:
    """By stage, how many documents were kept and how many files and documents not, for each reason; which are bad.

    `read` holds the facts of `documents.read_split` in the order of `splits`. Raises ValueError when a larger share
    of the files or of the documents is bad than `max_bad_fraction`.
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
    for what, bad, total in (
        ("files", len(broken), len(files)),
        ("documents", bad_documents, bad_documents + unfiltered),
    ):
        if bad > max_bad_fraction * total:
            examples = "; ".join(f"{some.path}: {some.reason}" for some in set_aside[:3])
            raise ValueError(
                f"{bad} of {total} {what} cannot be used, more than data.max_bad_fraction={max_bad_fraction:g} allows "
                f"({examples}); mend or remove them, or raise it"
            )
    return {"read": {**counts, "kept": unfiltered}, "filter": {"kept": counts["kept"], **filtered}}, set_aside


def without_broken(splits: list[list[Part]], read: list[Output]) -> list[list[Part]]:
    """`splits`, where all parts of a file that was cut and is unreadable in one of them have its problem.

    Nothing of a broken file is used, wherever its other parts were read.
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
