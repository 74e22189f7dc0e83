"""Runs a scenario once for each operation of each of its processes and each kind of failure at it."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import pytest
from tables_of_tests import Table

from multihop.cluster.jobs.head_script import HeadScriptFailed
from multihop.common.errors import UserError
from simulation.world import Fault, FaultKind, Killed, World

Scenario = Callable[[World], None]
"""Starts processes, runs the world, starts what is left to do again, and asserts what was promised."""

ALL_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_LONG = (pytest.mark.long, pytest.mark.timeout(3600))
_OTHER_SEEDS, _EVERY_OF_OTHER_SEEDS = (1, 2, 3), 7
_ANY: tuple[FaultKind, ...] = ("error", "slow", "suspend", "freeze", "jump", "kill", "orphan")
_KINDS: dict[str, tuple[FaultKind, ...]] = {
    "list": (*_ANY, "outage", "stale"),
    "head": (*_ANY, "outage"),
    "get": (*_ANY, "outage"),
    **dict.fromkeys(("put", "create", "replace", "remove", "copy"), (*_ANY, "outage", "lost", "late", "repeated")),
    "ask": (*_ANY, "outage"),
    "tell": (*_ANY, "outage", "lost", "late"),
    "query": (*_ANY, "outage"),
    "change": (*_ANY, "outage", "lost", "late"),
    **dict.fromkeys(
        ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "truncate", "write"), (*_ANY, "cut", "torn")
    ),
}
"""The kinds of failures by the first word of an operation."""


def every_and_seed(every: int, long: int = 1) -> list[Any]:
    """Values for `check_every_failure`: in `make test` every n-th fault; else every `long`-th, and with other seeds a
    part of these."""
    others = [pytest.param(_EVERY_OF_OTHER_SEEDS * long, seed, marks=_LONG) for seed in _OTHER_SEEDS]
    return [(every, 0), pytest.param(long, 0, marks=_LONG), *others]


def check_every_failure(
    scenario: Scenario, every: int, table: Table, kinds: Collection[FaultKind] = ALL_KINDS, seed: int = 0
) -> None:
    """Run a scenario once with each fault, or with every n-th of them, and show how many there were.

    Raises:
        AssertionError: promises were broken; the message has the faults, with which `World` shows them again.
    """
    with World(seed) as world:
        scenario(world)
        _check_errors(world, ())
    faults = [
        (operation, Fault(process.name, number, kind))
        for process in world.processes
        for number, operation in enumerate(process.operations, start=1)
        for kind in _KINDS[operation.split()[0]]
        if kind in kinds and (process.parent is not None or kind != "orphan")
    ]
    chosen, broken = faults[::every], []
    for operation, fault in chosen:
        with World(seed, fault) as world:
            try:
                scenario(world)
                assert world.happened, "the operation did not come again"
                (met,) = [each.operations[fault.number - 1] for each in world.processes if each.name == fault.process]
                assert met.split()[0] == operation.split()[0], f"it happened at {met!r}"
                # No process may fail because its wall clock is wrong.
                expected = () if fault.kind == "jump" else (OSError, UserError, HeadScriptFailed, Killed)
                _check_errors(world, expected)
            except Exception as error:
                broken.append(f"{fault} at {operation!r}: {error!r}")
    shown = "\n".join(broken)
    assert not broken, f"with seed {seed}, {len(broken)} of {len(chosen)} faults broke a promise:\n{shown}"
    counts = Counter((operation.split()[0], fault.kind) for operation, fault in chosen)
    table(f"with seed {seed}, {len(chosen):,} of {len(faults):,} faults broke no promise:\n{_cross_table(counts)}")


def _check_errors(world: World, expected: tuple[type[BaseException], ...]) -> None:
    """Check that processes and threads ended by no other errors; those of threads are never expected."""
    for process in world.processes:
        if process.error is not None and not isinstance(process.error, expected):
            raise AssertionError(f"{process.name} ended by {process.error!r}") from process.error
        for error in process.thread_errors:
            raise AssertionError(f"a thread of {process.name} ended by {error!r}") from error


def _cross_table(counts: Mapping[tuple[str, FaultKind], int]) -> str:
    """How many faults of each kind happened at each operation."""
    kinds = [kind for kind in ALL_KINDS if any(kind == each for _, each in counts)]
    lines = [f"{'':10}" + "".join(f"{kind:>10}" for kind in kinds)]
    for operation in sorted({operation for operation, _ in counts}):
        lines.append(f"{operation:10}" + "".join(f"{counts.get((operation, kind), 0):10,}" for kind in kinds))
    return "\n".join(lines)
