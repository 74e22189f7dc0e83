"""Counts what was read and what was set aside and why; refuses too much of the latter."""

import dataclasses
from collections import Counter

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import SetAside
from multihop.data_prep.pipeline.select_documents import FRAGMENTS
from multihop.data_prep.reading.sources import FileRange
from multihop.data_prep.stages.outputs import Output

NAMED_PER_FILE = 20
_NAMED_BYTES = 4 * 2**20
"""Limit on the names and reasons of bad files, and of those of bad documents: each reader of a manifest parses them."""
_REASONS = 1000
"""The most distinct reasons; further ones are counted together, since a reason may contain a number."""
_NAMED_REASONS = 5
"""The most reasons in a message."""
_ADVICE = {
    "read": "correct data.sources[].field or the files",
    "filter": "relax or remove these rules of data.filters",
    "decontaminate": "correct data.decontaminate",
}
_NOT_DROPPED = ("kept", FRAGMENTS)


def count_outcomes(
    splits: list[list[FileRange]], read: list[Output], max_bad_fraction: float
) -> tuple[dict[str, dict[str, int]], list[SetAside]]:
    """Count by stage and outcome ("kept" or a reason), and list the bad files and documents.

    Everything is counted; the first NAMED_PER_FILE bad documents of each file are listed, within _NAMED_BYTES.

    Args:
        read: outputs of `documents.read_split` for `splits`.

    Raises:
        UserError: The share of bad files or of bad documents exceeds `max_bad_fraction`.
    """
    counts: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    set_aside: list[SetAside] = []
    room = {"files": _NAMED_BYTES, "documents": _NAMED_BYTES}
    bad_documents = 0
    positions_before: Counter[tuple[int, str]] = Counter()
    named: Counter[tuple[int, str]] = Counter()
    files, broken = set(), set()

    def name_one(kind: str, path: str, reason: str) -> None:
        room[kind] -= len(path.encode()) + len(reason.encode())
        if room[kind] >= 0:
            set_aside.append(SetAside(path=path, reason=reason))

    for ranges, output in zip(splits, read, strict=True):
        for file_range, part in zip(ranges, output.metadata["parts"], strict=True):
            name = file_range.file.name
            file = (file_range.file.source, file_range.file.path)
            files.add(file)
            counts["kept"] += part["documents"]
            if part["unreadable"] and file not in broken:
                broken.add(file)
                counts[part["unreadable"]] += 1
                name_one("files", name, part["unreadable"])
            filtered.update(part["filtered"])
            for reason, number in part["bad"].items():
                bad_documents += number
                counts[reason] += number
            for position, reason in part["named"]:
                if named[file] < NAMED_PER_FILE:
                    named[file] += 1
                    where = (
                        name
                        if file_range.file.documents == "file" and file_range.file.format == "txt"
                        else f"{name}:{position + positions_before[file]}"
                    )
                    name_one("documents", where, reason)
            positions_before[file] += part["places"]
    unfiltered = counts["kept"] + filtered.total()
    is_pairs = any(file_range.file.holds_pairs for ranges in splits[:1] for file_range in ranges)
    for what, bad, total in (
        ("files", len(broken), len(files)),
        ("pairs" if is_pairs else "documents", bad_documents, bad_documents + unfiltered),
    ):
        if bad > max_bad_fraction * total:
            examples = "; ".join(f"{some.path}: {some.reason}" for some in set_aside[:3])
            raise UserError(
                f"{bad} of {total} {what} cannot be used, more than data.max_bad_fraction={max_bad_fraction:g} allows "
                f"({examples}); repair or remove them, or raise it"
            )
    kept = counts.pop("kept", 0)
    return {"read": {"kept": unfiltered, **_most_frequent(counts)}, "filter": {"kept": kept, **filtered}}, set_aside


def _most_frequent(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of the `_REASONS` most frequent reasons, and the sum of all others."""
    few = dict(counts.most_common(_REASONS)) if len(counts) > _REASONS else dict(counts)
    others = counts.total() - sum(few.values())
    return {**few, **({"other reasons": others} if others else {})}


def explain_nothing_left(counts: dict[str, dict[str, int]], is_pairs: bool) -> str:
    """Return a sentence that says which rules dropped all documents or pairs, and what to do."""
    dropped = [
        (number, stage, reason)
        for stage in _ADVICE
        for reason, number in counts.get(stage, {}).items()
        if number and reason not in _NOT_DROPPED and not reason.startswith("contaminated by ")
    ]
    what = "pair" if is_pairs else "document"
    if not dropped:
        return f"data.sources have no {what}; add text, or correct data.sources[].field"
    most = sorted(dropped, reverse=True)[:_NAMED_REASONS]
    reasons = "; ".join(f"{stage}: {number:,} {reason}" for number, stage, reason in most)
    return f"all {what}s of data.sources were dropped ({reasons}); {_ADVICE[most[0][1]]}, or add text"


def mark_broken_files(splits: list[list[FileRange]], read: list[Output]) -> list[list[FileRange]]:
    """Mark all ranges of a file as unreadable if one file_range is.

    Nothing of a broken file is used, even if its other ranges were read. The file may be readable for another source,
    which reads other fields.
    """
    broken = {
        (file_range.file.source, file_range.file.path): part["unreadable"]
        for ranges, output in zip(splits, read, strict=True)
        for file_range, part in zip(ranges, output.metadata["parts"], strict=True)
        if part["unreadable"] and file_range.stop - file_range.start < file_range.file.size
    }

    def mark(file_range: FileRange) -> FileRange:
        problem = broken.get((file_range.file.source, file_range.file.path))
        return (
            file_range
            if problem is None
            else dataclasses.replace(file_range, file=dataclasses.replace(file_range.file, problem=problem))
        )

    return [[mark(file_range) for file_range in ranges] for ranges in splits]
