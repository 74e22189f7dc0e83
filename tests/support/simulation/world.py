"""Simulated processes: threads of this one, which take turns at operations on simulated stores, disks and clocks.

Real code runs, with its own threads and locks. Whatever it does between two operations takes no time. A seed decides
whose turn is next, and a fault can happen at any operation of any process, so that a failure is found again by its
seed, process, number and kind.

Turns need to know when a thread can go no further by itself: it waits for its turn, or for another thread, in a lock.
The latter is seen from outside: the kernel says that it sleeps, and that it has not been awake meanwhile. A thread that
sleeps elsewhere may also wait for threads that are not Python's, such as Arrow's: it is given a moment more.
"""

import dis
import errno
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar
from unittest import mock

from multihop.common import clock

T = TypeVar("T")
FaultKind = Literal[
    "error",
    "lost",
    "late",
    "repeated",
    "stale",
    "slow",
    "outage",
    "suspend",
    "freeze",
    "jump",
    "kill",
    "orphan",
    "cut",
    "torn",
]
SUSPENDED_S = 90.0
"""Seconds of a suspension, of an outage, and of a slow operation of a disk: more than the life of a lease."""
ANSWER_S = 55.0
"""Seconds after which a slow request is answered: boto3, Ray's client and MLflow's thread wait for 60 s."""
LATE_S = 100.0
"""Seconds after which a request that timed out arrives nevertheless."""
_ENDS_WITH_PARENT = 0.5
"""Probability that a process whose parent has died ends at its next operation."""
_DAY_S = 86_400.0
_EPOCH_S = 1_800_000_000.0
_ANSWERED = ("put", "create", "replace", "remove", "copy", "ask", "tell", "query", "change")
_ASKED_AGAIN = ("list", "head", "get")
"""Requests of pyarrow: it repeats one that is not answered within 3 s, with waits of 100 s in all."""
_STUCK_S = 60.0
_LOOK_S = 0.0005
_MOMENT_S = 0.25


class Killed(BaseException):
    """What each operation of a killed process raises: nothing that it does has an effect any more."""


class Fault(NamedTuple):
    """What happens to a process at one of its operations.

    error     the operation fails and has no effect
    lost      it has its effect, but its response is lost
    late      it fails, and has its effect 100 s later
    repeated  its response is lost, and the library sends the request again
    stale     a listing is the one before the newest change
    slow      it has its effect, and its response comes 55 s later (of a disk 90 s); other threads of the process go on.
              What the library asks again meanwhile, it is told after 90 s
    outage    this one and all of the process's operations fail for 90 s
    suspend   the process stands still for 90 s before it, as on a laptop that sleeps
    freeze    the same, and its clocks stand still too, as in a virtual machine that is moved
    jump      the wall clock of its process jumps a day ahead before it, and two days back before the next one
    kill      the process is killed before it
    orphan    the process that started this one is killed before it; all that it started end at one of their next
              operations
    cut       power is cut before it: all processes end, and of the disk only what was synced is certain to be left
    torn      the same, and of what was not synced any part is left
    """

    process: str
    number: int
    """From 1."""
    kind: FaultKind


@dataclass
class Process:
    """A simulated process."""

    name: str
    parent: "Process | None" = None
    """The process without which this one ends, at one of its operations; None: it does not."""
    operations: list[str] = field(default_factory=list)
    """What it did: one entry an operation."""
    result: Any = None
    error: BaseException | None = None
    """What ended it, if not the end of its function."""
    is_dead: bool = False
    suspended_until: float = 0.0
    slow_until: float = 0.0
    slept_s: float = 0.0
    """Seconds for which it was suspended."""
    frozen_s: float = 0.0
    """Seconds for which its clocks stood still."""
    thread_errors: list[BaseException] = field(default_factory=list)
    """What ended its other threads, if not their functions' end."""
    outage_until: float = 0.0
    threads: int = 0


@dataclass(eq=False)
class _Turns:
    """A thread, and what it waits for."""

    process: Process
    number: int
    thread: threading.Thread
    is_parked: bool = False
    has_ended: bool = False
    wakes_at: float = 0.0
    event: threading.Event | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class World:
    """Simulated processes and their clock; use it as a context, within which the code under test meets it."""

    def __init__(self, seed: int = 0, fault: Fault | None = None) -> None:
        """Start at second 1,000, without processes."""
        self.time = 1000.0
        self.fault = fault
        self.happened = False
        """Whether the fault happened."""
        self.on_cut: list[Callable[[bool], None]] = []
        """Called after a power cut, with whether writes were torn."""
        self._cut: FaultKind | None = None
        self.processes: list[Process] = []
        """All that were started, in order."""
        self.history: list[tuple[float, str, str]] = []
        """Time, process and name of each operation, in order."""
        self._random = random.Random(seed)
        self._turns: dict[threading.Thread, _Turns] = {}
        self._changed = threading.Semaphore(0)
        self._late: list[tuple[float, Callable[[], Any]]] = []
        self._context = ExitStack()

    def __enter__(self) -> "World":
        for name, replacement in (
            ("monotonic", self._monotonic),
            ("boottime", self._boottime),
            ("sleep", self.sleep),
            ("wait", self._wait),
        ):
            self._context.enter_context(mock.patch.object(clock, name, replacement))
        self._context.enter_context(mock.patch.object(time, "time", self._wall))
        self._context.enter_context(mock.patch.object(time, "time_ns", lambda: round(self._wall() * 1e9)))
        self._context.enter_context(self._followed_threads())
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.is_dead = True
        self.run()
        self._context.close()
        for process in self.processes:  # with their frames go executors, whose threads then end
            process.error = process.result = None
            process.thread_errors.clear()

    def process(self) -> Process | None:
        """The process of this thread; None: it is not simulated."""
        turns = self._turns.get(threading.current_thread())
        return turns.process if turns else None

    def stands_still(self, process: Process) -> bool:
        """Whether a process is suspended, or one of its threads waits for a slow operation."""
        return max(process.suspended_until, process.slow_until) > self.time

    def start(self, name: str, function: Callable[[], Any], parent: Process | None = None) -> Process:
        """Start a process."""
        process = Process(name, parent)
        self.processes.append(process)

        def main() -> None:
            try:
                process.result = function()
            except BaseException as error:
                process.error = error
            finally:
                process.is_dead = True  # with its daemon threads

        self._start(threading.Thread(target=main, name=name, daemon=True), process)
        return process

    def kill(self) -> NoReturn:
        """End the process of this thread at once."""
        process = self.process()
        assert process is not None, "only a simulated process can be killed"
        process.is_dead = True
        raise Killed

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Give turns until all processes have ended, or until a condition holds between two operations.

        Raises:
            RuntimeError: no thread can go on, or one goes on for ever without an operation.
        """
        since = 0.0
        while not until():
            running = self._settle()
            if self._cut is not None:
                for restore in self.on_cut:
                    restore(self._cut == "torn")
                self._cut = None
            parked = [turns for turns in self._turns.values() if turns.is_parked]
            ready = [turns for turns in parked if self._is_ready(turns)]
            if ready:
                turns = self._random.choice(sorted(ready, key=lambda turns: (turns.process.name, turns.number)))
                turns.is_parked = False
                turns.turn.release()
                continue
            if running and not parked and not self._late and any(not turns.process.is_dead for turns in running):
                # They may wait for threads that are not Python's, of Arrow for example.
                since = since or time.monotonic()
                if time.monotonic() - since > _STUCK_S:
                    raise RuntimeError(f"all threads wait for each other\n{self._stacks(running)}")
                continue
            since = 0.0
            times = [max(turns.wakes_at, turns.process.suspended_until) for turns in parked]
            times += [at for at, _ in self._late]
            if not times:
                return
            self.time = max(self.time, min(times))
            due = [late for late in self._late if late[0] <= self.time]
            self._late = [late for late in self._late if late[0] > self.time]
            for _, effect in due:
                with suppress(Exception):  # an error too is a response that nobody gets
                    effect()

    def operate(self, what: str, effect: Callable[[], T]) -> T:
        """Have the effect of an operation when it is this thread's turn, or what a fault makes of it.

        Args:
            what: the operation and its path.
        """
        turns = self._turns.get(threading.current_thread())
        if turns is None:
            return effect()
        self._park(turns, self.time)
        process = turns.process
        if process.parent is not None and process.parent.is_dead and self._random.random() < _ENDS_WITH_PARENT:
            self.kill()
        process.operations.append(what)
        self.history.append((self.time, process.name, what))
        fault = self.fault
        if fault is None or (fault.process, fault.number) != (process.name, len(process.operations)):
            if self.time < process.outage_until:
                raise OSError(errno.EIO, f"{what}: no answer")
            return effect()
        self.happened = True
        match fault.kind:
            case "error":
                raise OSError(errno.EIO, f"{what}: refused")
            case "lost":
                effect()
                raise OSError(errno.EIO, f"{what}: the response was lost")
            case "late":
                self._late.append((self.time + LATE_S, effect))
                raise OSError(errno.EIO, f"{what}: no answer")
            case "repeated":
                effect()
                return effect()
            case "kill":
                self.kill()
            case "orphan":
                assert process.parent is not None
                process.parent.is_dead = True
                return effect()
            case "cut" | "torn":
                for other in self.processes:
                    other.is_dead = True
                self._cut = fault.kind
                raise Killed
            case "suspend" | "freeze":
                process.suspended_until = self.time + SUSPENDED_S
                process.slept_s += SUSPENDED_S
                process.frozen_s += SUSPENDED_S if fault.kind == "freeze" else 0.0
                self._park(turns, self.time)
                return effect()
            case "slow":
                word = what.split()[0]
                process.slow_until = self.time + (ANSWER_S if word in _ANSWERED else SUSPENDED_S)
                if word in _ASKED_AGAIN:
                    self._park(turns, process.slow_until)
                    return effect()
                result = effect()
                self._park(turns, process.slow_until)
                return result
            case "outage":
                process.outage_until = self.time + SUSPENDED_S
                raise OSError(errno.EIO, f"{what}: no answer")
            case "stale" | "jump":
                return effect()
        raise AssertionError(fault.kind)

    def is_stale(self) -> bool:
        """Whether the listing that this thread asks for is an old one."""
        process = self.process()
        return process is not None and self.fault == (process.name, len(process.operations), "stale")

    def sleep(self, seconds: float) -> None:
        """`clock.sleep` of a simulated process."""
        turns = self._turns.get(threading.current_thread())
        if turns is None:
            time.sleep(seconds)
        else:
            self._park(turns, self.time + seconds)

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        turns = self._turns.get(threading.current_thread())
        if turns is None:
            return event.wait(seconds)
        turns.event = event
        try:
            self._park(turns, self.time + seconds)
        finally:
            turns.event = None
        return event.is_set()

    def _monotonic(self) -> float:
        process = self.process()
        return self.time - (process.slept_s if process else 0.0)

    def _boottime(self) -> float:
        process = self.process()
        return self.time - (process.frozen_s if process else 0.0)

    def _wall(self) -> float:
        process = self.process()
        if process is None:
            return _TIME()
        jumped, fault = 0.0, self.fault
        if fault is not None and fault.kind == "jump" and fault.process == process.name:
            done = len(process.operations)
            jumped = 0.0 if done < fault.number else _DAY_S if done == fault.number else -_DAY_S
        return _EPOCH_S + self.time + jumped

    def _is_ready(self, turns: _Turns) -> bool:
        process = turns.process
        if process.is_dead:
            return True
        is_due = turns.wakes_at <= self.time or (turns.event is not None and turns.event.is_set())
        return is_due and process.suspended_until <= self.time

    def _park(self, turns: _Turns, wakes_at: float) -> None:
        if not turns.process.is_dead:
            turns.wakes_at, turns.is_parked = wakes_at, True
            self._changed.release()
            turns.turn.acquire()
        if turns.process.is_dead:
            raise Killed

    def _start(self, thread: threading.Thread, process: Process) -> None:
        turns = _Turns(process, process.threads, thread)
        process.threads += 1
        self._turns[thread] = turns
        run = thread.run

        def run_in_turns() -> None:
            try:
                self._park(turns, self.time)
                run()
            except Killed:
                pass
            except BaseException as error:
                process.thread_errors.append(error)
                raise
            finally:
                turns.has_ended = True
                self._changed.release()

        thread.run = run_in_turns  # type: ignore[method-assign]
        _START(thread)

    @contextmanager
    def _followed_threads(self) -> Iterator[None]:
        """Make the threads that simulated processes start their own."""

        def start(thread: threading.Thread) -> None:
            process = self.process()
            if process is None:
                _START(thread)
            else:
                self._start(thread, process)

        with mock.patch.object(threading.Thread, "start", start):
            yield

    def _settle(self) -> list[_Turns]:
        """Wait until no thread goes on by itself; returns those that wait for others and not for their turn."""
        since = awake = time.monotonic()
        before: dict[_Turns, int] = {}
        while True:
            for turns in [turns for turns in self._turns.values() if turns.has_ended]:
                del self._turns[turns.thread]
            running = [turns for turns in self._turns.values() if not turns.is_parked]
            if not running:
                return []
            seen = {turns: _progress(turns.thread) for turns in running}
            now = time.monotonic()
            if not all(seen[turns] is not None and before.get(turns) == seen[turns] for turns in running):
                awake = now
            elif now - awake > _MOMENT_S or all(_waits_for_python(turns.thread) for turns in running):
                return running
            if now - since > _STUCK_S:
                raise RuntimeError(f"a thread goes on without an operation\n{self._stacks(running)}")
            before = {turns: progress for turns, progress in seen.items() if progress is not None}
            self._changed.acquire(timeout=_LOOK_S)

    def _stacks(self, running: list[_Turns]) -> str:
        frames = sys._current_frames()
        return "\n".join(
            f"{turns.process.name}, thread {turns.thread.name}:\n" + "".join(traceback.format_stack(frames[ident]))
            for turns in running
            if (ident := turns.thread.ident) in frames
        )


_START, _TIME = threading.Thread.start, time.time
_WAITING = {module.__file__ for module in (threading, queue, futures._base, futures.thread)}


def _waits_for_python(thread: threading.Thread) -> bool:
    """Whether a thread that sleeps does so in a lock, a queue or an executor of Python's."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code.co_filename in _WAITING:
        return True
    # `with lock`, which calls no Python. From Python 3.14 on the operation has another name.
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BEFORE_WITH"


def _progress(thread: threading.Thread) -> int | None:
    """How often a thread that sleeps has gone to sleep; None: it runs, or has only just started or ended."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines["voluntary_ctxt_switches"]) if lines["State"].strip().startswith("S") else None
