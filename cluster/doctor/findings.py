"""What is wrong, judged from the facts of all nodes. Pure functions; `rounds.gather` describes the facts."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from multihop.cluster.doctor.finding import ClusterReport, Finding, gigabytes, rate
from multihop.cluster.doctor.gpu_findings import gpu_findings

_Key = TypeVar("_Key")
CLOCK_S = 1.0
"""Clocks may differ by this: leases, timestamps of metrics and signatures of requests to a store bear it."""
SLOW_DEVICE, SLOW_LINK, SLOW_STORE = 0.8, 0.5, 0.25
"""Shares of the median. A step is as slow as its slowest rank; rates of networks vary more than those of processors,
and those of a disk that others use most."""
FREE_DISK, FREE_SHARE = 5 * 10**9, 0.05
"""Ray stops to store objects on a disk that is 95 % full."""
AVAILABLE_MEMORY, FREE_SHM, OPEN_FILES = 2 * 10**9, 10**9, 4096


def findings(report: ClusterReport) -> list[Finding]:
    """All findings about a cluster; none: nothing is wrong."""
    checks: Sequence[Callable[[ClusterReport], Iterator[Finding]]] = (
        _lost,
        _unanswered,
        _room,
        _versions,
        _space,
        _clocks,
        _devices,
        gpu_findings,
        _places,
        _links,
        _tracking,
        _step,
    )
    return [finding for check in checks for finding in check(report)]


def differing(values: Mapping[str, Any], head: str) -> tuple[Any, dict[str, Any]]:
    """The value that most nodes have, and {node: value} of the others. The head decides between equal numbers."""
    counts = Counter(map(repr, values.values()))
    first = max(values, key=lambda name: (counts[repr(values[name])], name == head))
    usual = values[first]
    return usual, {name: value for name, value in values.items() if value != usual}


def slow(rates: Mapping[_Key, float], share: float) -> tuple[float, dict[_Key, float]]:
    """The median of rates, and those below `share` of it."""
    if not rates:
        return 0.0, {}
    median = statistics.median(rates.values())
    return median, {name: value for name, value in rates.items() if value < share * median}


def _lost(report: ClusterReport) -> Iterator[Finding]:
    for name in report["lost"]:
        yield Finding(name, "node", "Ray lost it", "every node alive", "start Ray there again, and see why it ended")


def _unanswered(report: ClusterReport) -> Iterator[Finding]:
    advice = {
        "machine": "see whether the host and its network are up, and that this project can be imported there",
        "clock": "see whether the host and its network are up",
        "compute": "see whether torch can be imported there, and whether another job holds the GPUs",
        "gpus_idle": "install NVIDIA's driver there",
    }
    for name, facts in report["nodes"].items():
        for question, then in advice.items():
            if "error" in facts.get(question, {}):
                yield Finding(name, question, facts[question]["error"], "an answer", then)


def _room(report: ClusterReport) -> Iterator[Finding]:
    kind, needed = ("gpus", report["needs"]["ranks"]) if report["needs"]["gpu"] else ("cpus", report["needs"]["ranks"])
    there = sum(int(facts[kind]) for facts in report["nodes"].values())
    free = sum(facts["free"][kind] for facts in report["nodes"].values())
    name, wanted = f"{kind.upper()[:-1]}s", f"{needed} for cluster.workers"
    if there < needed:
        yield Finding("the cluster", "room", f"{there} {name} in all", wanted, "lower cluster.workers, or add nodes")
    elif free < needed:
        advice = "a run would wait until other jobs end: stop them, lower cluster.workers, or add nodes"
        yield Finding("the cluster", "room", f"{free} free {name} of {there}", wanted, advice)
    for name, facts in report["nodes"].items():
        if report["needs"]["gpu"] and facts["gpus"] == 0:
            yield Finding(name, "room", "Ray knows no GPU there", "GPUs", "install the driver, and start Ray again")


def _versions(report: ClusterReport) -> Iterator[Finding]:
    machines, head = _answers(report, "machine"), _head(report)
    packages = dict.fromkeys(package for each in machines.values() for package in each["versions"])
    for package in packages:
        usual, others = differing({name: each["versions"].get(package) for name, each in machines.items()}, head)
        for name, version in others.items():
            what = "not installed" if version is None else f"{package} {version}"
            wanted = f"{package} {usual}" if usual is not None else f"no {package}"
            yield Finding(
                name, "version", what, f"{wanted}, as on most nodes", "install the versions of constraints.txt"
            )
    usual, others = differing({name: each["code"] for name, each in machines.items()}, head)
    for name, code in others.items():
        seen, expected = (f"code {value[:12]}" if value else "no code" for value in (code, usual))
        yield Finding(name, "version", seen, f"{expected}, as on most nodes", "install the same commit on all nodes")
    for what in ("cuda", "nccl"):
        usual, others = differing({name: each[what] for name, each in _answers(report, "compute").items()}, head)
        for name, version in others.items():
            yield Finding(name, "version", f"{what} {version}", f"{usual}, as on most nodes", "install the same torch")
    for name, each in machines.items():
        for variable in each["missing_variables"]:
            advice = "set it before `ray start`"
            yield Finding(name, "environment", f"no {variable}", "that of cluster.env", advice)


def _space(report: ClusterReport) -> Iterator[Finding]:
    for name, each in _answers(report, "machine").items():
        for disk in each["disks"]:
            free, total = disk["free"], disk["total"]
            wanted = f"{gigabytes(FREE_DISK)} and {FREE_SHARE:.0%}"
            if free < FREE_DISK or free < FREE_SHARE * total:
                seen = f"{gigabytes(free)} of {gigabytes(total)} free at {disk['path']}"
                yield Finding(name, "disk", seen, wanted, "free disk space")
        available = each["memory"]["available"]
        if available < AVAILABLE_MEMORY:
            seen, wanted = f"{gigabytes(available)} of memory left", gigabytes(AVAILABLE_MEMORY)
            yield Finding(name, "memory", seen, wanted, "see what else runs there")
        if (free := each["shm"]["free"]) < FREE_SHM:
            advice = "enlarge it (docker run --shm-size), or remove what is left in it"
            yield Finding(name, "shm", f"{gigabytes(free)} free in /dev/shm", gigabytes(FREE_SHM), advice)
        if 0 <= each["open_files"] < OPEN_FILES:
            seen = f"a limit of {each['open_files']} open files"
            yield Finding(name, "open files", seen, f"{OPEN_FILES}", "raise it with `ulimit -n` before `ray start`")


def _clocks(report: ClusterReport) -> Iterator[Finding]:
    clocks, head = _answers(report, "clock"), _head(report)
    if not clocks:
        return
    ahead = {name: each["ahead"] for name, each in clocks.items()}
    # Of two clocks either may be wrong: that of the head counts as right.
    right = statistics.median(ahead.values()) if len(ahead) > 2 else ahead.get(head, min(ahead.values(), key=abs))
    for name, each in clocks.items():
        wrong = each["ahead"] - right
        if abs(wrong) - each["uncertainty"] > CLOCK_S:
            seen = f"{abs(wrong):.1f} s {'ahead' if wrong > 0 else 'behind'}"
            yield Finding(
                name, "clock", seen, f"within {CLOCK_S:.0f} s of the others", "synchronize it (chronyd, ntpd)"
            )


def _devices(report: ClusterReport) -> Iterator[Finding]:
    answers = _answers(report, "compute")
    devices = {
        (name, number): each for name, answer in answers.items() for number, each in enumerate(answer["devices"])
    }
    for (name, number), each in devices.items():
        if each["wrong"]:
            seen = f"device {number} computed {each['wrong']} of 20 matrix products wrongly"
            yield Finding(name, "compute", seen, "none", "take the node out, and have the device replaced")
    for kind in dict.fromkeys(each["name"] for each in devices.values()):
        median, below = slow({key: each["flops"] for key, each in devices.items() if each["name"] == kind}, SLOW_DEVICE)
        for (name, number), flops in below.items():
            load = report["nodes"][name]["machine"]["load"]
            seen = f"device {number} multiplies matrices at {flops / 1e9:,.0f} GFLOP/s (load {load})"
            wanted = f"{SLOW_DEVICE:.0%} of the median of {median / 1e9:,.0f}"
            yield Finding(name, "compute", seen, wanted, "see what else runs there, its limits and its cooling")


def _places(report: ClusterReport) -> Iterator[Finding]:
    by_place: dict[str, dict[str, dict[str, Any]]] = {}
    for name, facts in report["nodes"].items():
        for place, found in facts.get("places", {}).items():
            by_place.setdefault(place, {})[name] = found
    for place, found in by_place.items():
        good = {name: each for name, each in found.items() if "error" not in each}
        for name, each in found.items():
            if "error" in each:
                other = f" (of {each['read_of']})" if "read_of" in each else ""
                advice = "give access, free space, or mount the same folder on all nodes"
                yield Finding(name, "store", f"{each['error']}{other}", f"{place} written and read", advice)
            elif not each["same"]:
                seen = f"another content in what {each['read_of']} wrote to {place}"
                yield Finding(name, "store", seen, "the same content", "do not use this store")
        yield from _atomic(place, good)
        for what in ("write_rate", "read_rate"):
            median, below = slow({name: each[what] for name, each in good.items()}, SLOW_STORE)
            for name, value in below.items():
                seen = f"{what.partition('_')[0]} {place} at {rate(value)}"
                wanted = f"{SLOW_STORE:.0%} of the median of {rate(median)}"
                yield Finding(name, "store", seen, wanted, "see its disk, its network and how the folder is mounted")


def _atomic(place: str, found: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """Of all that create one file at once, one at most may succeed, and all must then read that one's."""
    creators = sorted(name for name, each in found.items() if each["created"])
    owners = {each["owner"] for each in found.values()}
    advice = "use another store: on this one two runs could own one folder"
    if len(creators) > 1:
        seen = f"each created the one file in {place} that only one may"
        yield Finding(", ".join(creators), "store", seen, "one node at most", advice)
    elif len(owners) > 1 or (creators and owners != {found[creators[0]]["own"]}):
        yield Finding(
            ", ".join(sorted(found)), "store", f"different contents of one file in {place}", "the same", advice
        )


def _links(report: ClusterReport) -> Iterator[Finding]:
    groups: dict[tuple[int, str], dict[str, float]] = {}
    for link in report["links"]:
        name = " - ".join(link["nodes"])
        if "error" in link:
            advice = "see the network between them, firewalls and /etc/hosts, and which interface has Ray's address"
            yield Finding(name, "link", f"all-reduce failed: {link['error']}", "an answer", advice)
            continue
        for size, value in link["rates"].items():
            groups.setdefault((len(link["nodes"]), size), {})[name] = value
    largest = max((int(size) for _, size in groups), default=0)
    for (ends, size), rates in groups.items():
        median, below = slow(rates, SLOW_LINK) if int(size) == largest else (0.0, {})
        for name, value in below.items():
            where = "within the node" if ends == 1 else "between them"
            seen = f"all-reduce of {int(size) // 2**20} MiB {where} at {rate(value)}"
            wanted = f"{SLOW_LINK:.0%} of the median of {rate(median)}"
            yield Finding(name, "link", seen, wanted, "see cables, ports, speed of the interface and what else uses it")


def _tracking(report: ClusterReport) -> Iterator[Finding]:
    if "error" in report.get("tracking", {}):
        advice = "start the server, or correct tracking.uri or MLFLOW_TRACKING_URI"
        yield Finding(_head(report), "MLflow", report["tracking"]["error"], "an answer", advice)


def _step(report: ClusterReport) -> Iterator[Finding]:
    if "error" in report.get("step", {}):
        expected = "a step, a checkpoint, a restart and another step of the recipe"
        yield Finding("the cluster", "step", report["step"]["error"], expected, "correct this before the long run")


def _answers(report: ClusterReport, question: str) -> dict[str, dict[str, Any]]:
    """By node, without those that gave none."""
    found = {name: facts.get(question, {"error": "not asked"}) for name, facts in report["nodes"].items()}
    return {name: answer for name, answer in found.items() if "error" not in answer}


def _head(report: ClusterReport) -> str:
    return next((name for name, facts in report["nodes"].items() if facts["is_head"]), "")
