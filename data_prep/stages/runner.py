"""Runs the function of a stage over its items, in this process or anywhere in a cluster, and reports the progress."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multihop.data_prep.stages.outputs import LocalFile, Output

MapItems = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Runs a pure, picklable function on every item, anywhere, and yields the results in any order."""
ReportProgress = Callable[[str, int, int], None]
"""Called with the stage's name, the number of items done, and the number of all items."""
MapStage = Callable[[str, Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""`MapItems` that reports its progress under the stage's name, its first argument."""


def map_in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
    """`MapItems` that runs in this process, in order."""
    return map(function, items)


def no_report(stage: str, done: int, total: int) -> None:
    """`ReportProgress` that reports nothing."""


def with_progress(map_items: MapItems, report: ReportProgress) -> MapStage:
    """Wrap `map_items` so that it reports before the first item and after each."""

    def map_stage(stage: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        report(stage, 0, len(items))
        for done, result in enumerate(map_items(function, items), start=1):
            report(stage, done, len(items))
            yield result

    return map_stage


@dataclass(frozen=True)
class StageRunner:
    """Runs stages on any nodes; reads their outputs on this one."""

    map: MapStage
    """Yields the results of a stage in any order."""
    local_file: LocalFile

    def outputs(self, stage: str, function: Callable[[Any], Output], items: Sequence[Any]) -> list[Output]:
        """Run a stage whose items have keys; returns the outputs in the order of the items."""
        by_key = {output.key: output for output in self.map(stage, function, items)}
        return [by_key[item.key] for item in items]
