"""The time that a long run takes on nodes that fail: a simulation, and the formulas for the interval between saves.

Nodes fail at rates of their own, drawn from a heavy-tailed distribution: a few bad nodes cause most failures.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

_DAY = 86_400.0
_GRID = tuple(2.0 ** (power / 2) for power in range(-4, 5))
"""Multiples of Daly's interval that are tried."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster, and how they fail."""

    count: int
    """Nodes that the run trains on."""
    failures_per_day: float
    """Mean rate of a node."""
    spread: float = 1.5
    """Standard deviation of the logarithm of the rates; 0: all nodes are alike."""
    run_failures_per_day: float = 0.0
    """Failures that cost no node, such as those of software, whatever the number of nodes."""
    rack: int = 1
    """Nodes of a rack."""
    rack_share: float = 0.0
    """Share of the failures of nodes in which a whole rack is lost."""
    repair_s: float = 4 * 3600.0
    """Seconds until a node that failed is back."""
    replaced_after: int | None = None
    """A node that failed so often is replaced by another one, whose rate is drawn anew; None: never."""
    spares: int = 0
    """Further nodes, which take the place of those that fail."""


@dataclass(frozen=True)
class Recovery:
    """What a run does about failures, with the seconds that each part takes."""

    save_interval_s: float
    """Training time between two saves."""
    save_pause_s: float = 1.0
    """Training waits for so long at each save."""
    save_write_s: float = 30.0
    """From the pause to the commit, while training goes on."""
    detect_s: float = 10.0
    """From a failure to the end of the other ranks."""
    restart_s: float = 60.0
    """From there to the first step: placement, start of the processes, rendezvous, restoring. Both defaults are
    assumptions; `bench/recovery.py` measured 9.9 s and 8 s on two hosts."""
    fewest_nodes: int | None = None
    """If no spare node is left, the run continues with at least this many of its nodes, and is saved and restarted when
    one comes back; with fewer it waits for a repair. None: it needs all of them."""

    def duration(self, training_s: float) -> float:
        """Seconds of so much training with its saves; there is none at its end."""
        return training_s + max(0, math.ceil(training_s / self.save_interval_s) - 1) * self.save_pause_s

    def progress(self, elapsed_s: float) -> tuple[float, float]:
        """Seconds of training after some time, and those of them that a committed save has."""
        cycle = self.save_interval_s + self.save_pause_s
        cycles = math.floor(elapsed_s / cycle)
        trained = cycles * self.save_interval_s + min(elapsed_s - cycles * cycle, self.save_interval_s)
        committed = max(0, math.floor((elapsed_s - self.save_write_s) / cycle)) * self.save_interval_s
        return trained, committed


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    seconds: float
    failures: int
    lost_s: float
    """Training time that was done again."""
    down_s: float
    """Time from failures to the first step after them, waiting for nodes included, and that of other restarts."""
    paused_s: float
    """Time of the pauses of saves."""

    def goodput(self, work_s: float) -> float:
        """The time that the run would have taken without failures and saves, divided by the time that it took."""
        return work_s / self.seconds


def young_interval(pause_s: float, mean_time_to_failure_s: float) -> float:
    """The training time between saves with the smallest loss, to first order (Young 1974)."""
    return math.sqrt(2 * pause_s * mean_time_to_failure_s)


def daly_interval(pause_s: float, mean_time_to_failure_s: float) -> float:
    """The same to higher order (Daly 2006, equation 37)."""
    if pause_s >= 2 * mean_time_to_failure_s:
        return mean_time_to_failure_s
    ratio = math.sqrt(pause_s / (2 * mean_time_to_failure_s))
    return young_interval(pause_s, mean_time_to_failure_s) * (1 + ratio / 3 + ratio**2 / 9) - pause_s


def best_interval(nodes: Nodes, recovery: Recovery, work_s: float, seeds: Sequence[int]) -> float:
    """The training time between saves with the shortest simulated runs on average.

    A grid around Daly's interval is tried. Below the time that a save takes to write, saves would wait for each other.
    """
    rate = (nodes.count * nodes.failures_per_day + nodes.run_failures_per_day) / _DAY
    start = daly_interval(recovery.save_pause_s, 1 / rate)
    tried = sorted({max(start * factor, recovery.save_write_s) for factor in _GRID})

    def mean_time(interval: float) -> float:
        changed = replace(recovery, save_interval_s=interval)
        return sum(simulate(nodes, changed, work_s, seed).seconds for seed in seeds)

    return min(tried, key=mean_time)


def simulate(nodes: Nodes, recovery: Recovery, work_s: float, seed: int, most_s: float = math.inf) -> Outcome:
    """A run that needs `work_s` seconds on all nodes without failures and saves.

    With fewer nodes it is slower in proportion. A save counts from its commit on; the time since the newest one is
    trained again after a failure. Failures during a restart are not simulated.

    Args:
        most_s: After so many seconds the run is given up, and its `seconds` are infinite.
    """
    run = _Run(nodes, recovery, np.random.default_rng(seed))
    while run.done_s < work_s:
        run.train(work_s)
        if run.now_s > most_s:
            return Outcome(math.inf, run.failures, run.lost_s, run.down_s, run.paused_s)
    return Outcome(run.now_s, run.failures, run.lost_s, run.down_s, run.paused_s)


class _Run:
    """The state of a simulated run."""

    def __init__(self, nodes: Nodes, recovery: Recovery, generator: np.random.Generator) -> None:
        self._nodes, self._recovery, self._generator = nodes, recovery, generator
        self._rates = self._draw_rates(nodes.count + nodes.spares)
        self._failed = np.zeros(len(self._rates), int)
        self._is_up = np.ones(len(self._rates), bool)
        self._repairs: list[tuple[float, int]] = []
        self.now_s = self.done_s = self.lost_s = self.down_s = self.paused_s = 0.0
        self.failures = 0

    def train(self, work_s: float) -> None:
        """Train until the end, the next failure, or the repair of a node that the run misses."""
        nodes, recovery = self._nodes, self._recovery
        used = np.flatnonzero(self._is_up)[: nodes.count]
        speed = len(used) / nodes.count
        rate = float(self._rates[used].sum()) + nodes.run_failures_per_day / _DAY
        to_failure = float(self._generator.exponential(1 / rate))
        to_end = recovery.duration((work_s - self.done_s) / speed)
        to_repair = self._repairs[0][0] - self.now_s if len(used) < nodes.count else math.inf
        elapsed = min(to_failure, to_end, to_repair)
        trained, committed = (seconds * speed for seconds in recovery.progress(elapsed))
        self.now_s += elapsed
        if elapsed == to_end:
            self.paused_s += elapsed - (work_s - self.done_s) / speed
            self.done_s = work_s
            return
        self.paused_s += elapsed - trained / speed
        if elapsed == to_repair:  # saved before the restart
            self.done_s += trained
            self._restart(0.0)
            return
        self.failures += 1
        self.lost_s += (trained - committed) / speed
        self.done_s += committed
        if self._generator.random() < float(self._rates[used].sum()) / rate:
            self._lose_nodes(used)
        self._restart(recovery.detect_s)

    def _lose_nodes(self, used: np.ndarray) -> None:
        nodes, rates = self._nodes, self._rates[used]
        first = int(self._generator.choice(used, p=rates / rates.sum()))
        lost = [first]
        if self._generator.random() < nodes.rack_share:
            rack = first // nodes.rack * nodes.rack
            lost = list(range(rack, min(rack + nodes.rack, len(self._rates))))
        self._failed[first] += 1
        if self._failed[first] == nodes.replaced_after:
            self._failed[first], self._rates[first] = 0, self._draw_rates(1)[0]
        for node in lost:
            if self._is_up[node]:
                self._is_up[node] = False
                heapq.heappush(self._repairs, (self.now_s + nodes.repair_s, node))

    def _restart(self, detect_s: float) -> None:
        began = self.now_s
        self.now_s += detect_s
        self._repair()
        least = self._nodes.count if self._recovery.fewest_nodes is None else self._recovery.fewest_nodes
        while self._is_up.sum() < least:
            self.now_s = max(self.now_s, self._repairs[0][0])
            self._repair()
        self.now_s += self._recovery.restart_s
        self._repair()
        self.down_s += self.now_s - began

    def _repair(self) -> None:
        while self._repairs and self._repairs[0][0] <= self.now_s:
            self._is_up[heapq.heappop(self._repairs)[1]] = True

    def _draw_rates(self, count: int) -> np.ndarray:
        """Failures of nodes in a second; the mean of a log-normal variable is exp(mu + sigma**2 / 2)."""
        nodes = self._nodes
        mu = math.log(nodes.failures_per_day / _DAY) - nodes.spread**2 / 2
        return self._generator.lognormal(mu, nodes.spread, count)
