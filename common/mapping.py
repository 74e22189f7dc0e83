"""A function mapped over items, in this process or anywhere in a cluster, and how its progress is reported."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

MapItems = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Runs a pure, picklable function on every item, anywhere, and yields the results in any order."""
ReportProgress = Callable[[str, int, int], None]
"""Called with the stage's name, the number of items done, and the number of all items."""
MapStage = Callable[[str, Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""`MapItems` that reports its progress under the stage's name, its first argument."""


def map_in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
    """`MapItems` in this process, in order."""
    return map(function, items)


def no_report(stage: str, done: int, total: int) -> None:
    """`ReportProgress` that reports nothing."""


def reporting(map_items: MapItems, report: ReportProgress) -> MapStage:
    """`map_items` that reports before the first item and after each."""

    def map_stage(stage: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        report(stage, 0, len(items))
        for done, result in enumerate(map_items(function, items), start=1):
            report(stage, done, len(items))
            yield result

    return map_stage
