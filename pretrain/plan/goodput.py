"""The time that a long run takes on nodes that fail: a simulation, and the formulas for the interval between saves.

Nodes fail at rates of their own, drawn from a heavy-tailed distribution, because a few bad nodes cause most failures.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

_DAY = 86_400.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster, and how they fail."""

    count: int
    """Nodes that the run trains on."""
    failures_per_day: float
    """Mean rate of a node."""
    spread: float = 1.5
    """Standard deviation of the logarithm of the rates; 0: all nodes are alike."""
    rack: int = 1
    """Nodes of a rack."""
    rack_share: float = 0.0
    """Share of the failures in which a whole rack is lost."""
    repair_s: float = 4 * 3600.0
    """Seconds until a node that failed is back."""
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
    """From there to the first step: placement, start of the processes, rendezvous, restoring."""
    without_nodes: Literal["wait", "shrink"] = "wait"
    """What happens if no spare node is left: the run waits for a repair, or goes on with the nodes that are left."""


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    seconds: float
    failures: int
    lost_s: float
    """Training time that was done again."""
    down_s: float
    """Time from failures to the first step after them, waiting for nodes included."""
    paused_s: float
    """Time of the pauses of saves."""

    def goodput(self, work_s: float) -> float:
        """The share of the time that a run without failures and saves would have taken."""
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


def simulate(nodes: Nodes, recovery: Recovery, work_s: float, seed: int) -> Outcome:
    """A run that needs `work_s` seconds on all nodes without failures and saves.

    With fewer nodes it is slower in proportion. A save counts from its commit on; the time since the newest one is
    trained again after a failure.
    """
    generator = np.random.default_rng(seed)
    total = nodes.count + nodes.spares
    # The mean of a log-normal variable is exp(mu + sigma**2 / 2).
    rates = generator.lognormal(math.log(nodes.failures_per_day / _DAY) - nodes.spread**2 / 2, nodes.spread, total)
    is_up = np.ones(total, bool)
    repairs: list[tuple[float, int]] = []
    now = done = committed = lost = down = paused = 0.0
    failures = 0
    since_save = 0.0
    writing: tuple[float, float] | None = None
    """When the newest save is committed, and the work that it has."""

    def active() -> np.ndarray:
        return np.flatnonzero(is_up)[: nodes.count]

    def repaired() -> None:
        while repairs and repairs[0][0] <= now:
            is_up[heapq.heappop(repairs)[1]] = True

    next_failure = generator.exponential(1 / rates[active()].sum())
    while done < work_s:
        repaired()
        used = active()
        speed = len(used) / nodes.count
        to_save = recovery.save_interval_s - since_save
        until = min((work_s - done) / speed, to_save, next_failure)
        now, done, since_save, next_failure = (
            now + until,
            done + until * speed,
            since_save + until,
            next_failure - until,
        )
        if writing is not None and now >= writing[0]:
            committed, writing = writing[1], None
        if next_failure <= 0:
            failures += 1
            first = int(generator.choice(used, p=rates[used] / rates[used].sum()))
            rack = first // nodes.rack
            is_rack = generator.random() < nodes.rack_share
            for node in range(rack * nodes.rack, min((rack + 1) * nodes.rack, total)) if is_rack else (first,):
                if is_up[node]:
                    is_up[node] = False
                    heapq.heappush(repairs, (now + nodes.repair_s, node))
            lost += done - committed
            done, since_save, writing = committed, 0.0, None
            before = now
            now += recovery.detect_s
            repaired()
            least = nodes.count if recovery.without_nodes == "wait" else 1
            while is_up.sum() < least:
                now = max(now, repairs[0][0])
                repaired()
            now += recovery.restart_s
            down += now - before
            next_failure = generator.exponential(1 / rates[active()].sum())
        elif since_save >= recovery.save_interval_s and done < work_s:
            now, paused, since_save = now + recovery.save_pause_s, paused + recovery.save_pause_s, 0.0
            writing = now + recovery.save_write_s, done
    return Outcome(now, failures, lost, down, paused)
