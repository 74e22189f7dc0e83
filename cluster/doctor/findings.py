"""Finds the problems of a cluster in the report of `multihop.cluster.doctor.rounds.gather`."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_Key = TypeVar("_Key")
CLOCK_S = 1.0
"""Largest difference of clocks that leases, timestamps of metrics and signatures of requests to a store tolerate."""
SLOW_DEVICE, SLOW_LINK, SLOW_STORE = 0.8, 0.5, 0.25
"""Lowest shares of the median rate. A step is as slow as its slowest rank; network rates vary more than compute
rates, and rates of a shared disk vary most."""
FREE_DISK, FREE_SHARE = 5 * 10**9, 0.05
"""Ray stops storing objects on a disk that is 95 % full."""
AVAILABLE_MEMORY, FREE_SHM, OPEN_FILES = 2 * 10**9, 10**9, 4096


HOT = 85
"""Highest temperature of an idle GPU in degrees Celsius; most GPUs slow down from about 87 on."""
USED = 2 * 10**9
"""Most bytes of GPU memory in use before the measurements; the driver itself takes some hundred megabytes."""
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""NVML's nvmlClocksEventReason bits that are not the ordinary power limit."""
USER_XIDS = {13, 31, 43, 45, 68, 69}
"""Xid numbers of programs that failed or were killed; any other is an error of the driver, the GPU or the bus."""


NodeReport = dict[str, Any]
"""The answers of one node."""
ClusterReport = dict[str, Any]
"""The answers of all nodes, and the links between them, as `multihop.cluster.doctor.rounds.gather` returns them."""


@dataclass(frozen=True)
class Finding:
    """A problem, and what to do about it."""

    node: str
    """Name of the node, of both nodes of a link, or "the cluster"."""
    check: str
    seen: str
    expected: str
    advice: str


def findings(report: ClusterReport) -> list[Finding]:
    """Return all findings about a cluster; empty if there are no problems."""
    checks: Sequence[Callable[[ClusterReport], Iterator[Finding]]] = (
        _lost,
        _unanswered,
        _room,
        _versions,
        _space,
        _clocks,
        _devices,
        _gpus,
        _stores,
        _links,
        _tracking,
        _step,
    )
    return [finding for check in checks for finding in check(report)]


def find_differing(values: Mapping[str, Any], head: str) -> tuple[Any, dict[str, Any]]:
    """Return the value of most nodes, and {node: value} of the others. The head decides between equal numbers."""
    counts = Counter(map(repr, values.values()))
    first = max(values, key=lambda name: (counts[repr(values[name])], name == head))
    usual = values[first]
    return usual, {name: value for name, value in values.items() if value != usual}


def find_slow(rates: Mapping[_Key, float], share: float) -> tuple[float, dict[_Key, float]]:
    """Return the median of the rates, and the rates below `share` of it."""
    if not rates:
        return 0.0, {}
    median = statistics.median(rates.values())
    return median, {name: value for name, value in rates.items() if value < share * median}


def _lost(report: ClusterReport) -> Iterator[Finding]:
    for name in report["lost"]:
        yield Finding(name, "node", "lost by Ray", "every node alive", "restart Ray on it, and find out why it ended")


def _unanswered(report: ClusterReport) -> Iterator[Finding]:
    advice = {
        "machine": "check that the host and its network are up, and that the node can import this project",
        "clock": "check that the host and its network are up",
        "compute": "check that the node can import torch, and that no other job holds its GPUs",
        "gpus_idle": "install NVIDIA's driver on it",
    }
    for name, node in report["nodes"].items():
        for question, then in advice.items():
            if "error" in node.get(question, {}):
                yield Finding(name, question, node[question]["error"], "an answer", then)


def _room(report: ClusterReport) -> Iterator[Finding]:
    kind, needed = ("gpus", report["needs"]["ranks"]) if report["needs"]["gpu"] else ("cpus", report["needs"]["ranks"])
    total = sum(int(node[kind]) for node in report["nodes"].values())
    free = sum(node["free"][kind] for node in report["nodes"].values())
    name, wanted = f"{kind.upper()[:-1]}s", f"{needed} for cluster.workers"
    if total < needed:
        yield Finding(
            "the cluster", "capacity", f"{total} {name} in all", wanted, "lower cluster.workers, or add nodes"
        )
    elif free < needed:
        advice = "a run would wait until other jobs end: stop them, lower cluster.workers, or add nodes"
        yield Finding("the cluster", "capacity", f"{free} free {name} of {total}", wanted, advice)
    for name, node in report["nodes"].items():
        if report["needs"]["gpu"] and node["gpus"] == 0:
            yield Finding(name, "capacity", "no GPU known to Ray", "GPUs", "install the driver and restart Ray")


def _versions(report: ClusterReport) -> Iterator[Finding]:
    machines, head = _answers(report, "machine"), _head(report)
    packages = dict.fromkeys(package for each in machines.values() for package in each["versions"])
    for package in packages:
        usual, others = find_differing({name: each["versions"].get(package) for name, each in machines.items()}, head)
        for name, version in others.items():
            what = "not installed" if version is None else f"{package} {version}"
            wanted = f"{package} {usual}" if usual is not None else f"no {package}"
            yield Finding(
                name, "version", what, f"{wanted}, as on most nodes", "install the versions of constraints.txt"
            )
    usual, others = find_differing({name: each["code"] for name, each in machines.items()}, head)
    for name, code in others.items():
        seen, expected = (f"code {value[:12]}" if value else "no code" for value in (code, usual))
        yield Finding(name, "version", seen, f"{expected}, as on most nodes", "install the same commit on all nodes")
    for what in ("cuda", "nccl"):
        usual, others = find_differing({name: each[what] for name, each in _answers(report, "compute").items()}, head)
        for name, version in others.items():
            yield Finding(name, "version", f"{what} {version}", f"{usual}, as on most nodes", "install the same torch")
    for name, each in machines.items():
        for variable in each["missing_variables"]:
            advice = "set it before `ray start`"
            yield Finding(name, "environment", f"{variable} is not set", "set, because cluster.env names it", advice)


def _space(report: ClusterReport) -> Iterator[Finding]:
    for name, each in _answers(report, "machine").items():
        for disk in each["disks"]:
            free, total = disk["free"], disk["total"]
            wanted = f"{format_gigabytes(FREE_DISK)} and {FREE_SHARE:.0%}"
            if free < FREE_DISK or free < FREE_SHARE * total:
                seen = f"{format_gigabytes(free)} of {format_gigabytes(total)} free at {disk['path']}"
                yield Finding(name, "disk", seen, wanted, "free disk space")
        available = each["memory"]["available"]
        if available < AVAILABLE_MEMORY:
            seen, wanted = f"{format_gigabytes(available)} of memory left", format_gigabytes(AVAILABLE_MEMORY)
            yield Finding(name, "memory", seen, wanted, "check what else runs on it")
        if (free := each["shm"]["free"]) < FREE_SHM:
            advice = "enlarge it (docker run --shm-size), or remove what is left in it"
            yield Finding(name, "shm", f"{format_gigabytes(free)} free in /dev/shm", format_gigabytes(FREE_SHM), advice)
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
            yield Finding(name, "compute", seen, "none", "remove the node, and have the device replaced")
    for kind in dict.fromkeys(each["name"] for each in devices.values()):
        median, below = find_slow(
            {key: each["flops"] for key, each in devices.items() if each["name"] == kind}, SLOW_DEVICE
        )
        for (name, number), flops in below.items():
            load = report["nodes"][name]["machine"]["load"]
            seen = f"device {number} multiplies matrices at {flops / 1e9:,.0f} GFLOP/s (load {load})"
            wanted = f"{SLOW_DEVICE:.0%} of the median of {median / 1e9:,.0f}"
            yield Finding(name, "compute", seen, wanted, "check its load, its limits and its cooling")


def _gpus(report: ClusterReport) -> Iterator[Finding]:
    answered = {
        name: node["gpus_idle"]
        for name, node in report["nodes"].items()
        if "gpus_idle" in node and "error" not in node["gpus_idle"]
    }
    most = max((len(answer["gpus"]) for answer in answered.values()), default=0)
    for name, answer in answered.items():
        slowed: dict[str, Finding] = {}
        known, visible = report["nodes"][name]["gpus"], len(answer["gpus"])
        if visible < most or known != visible:
            seen = f"{visible} GPUs, of which Ray knows {known}"
            yield Finding(name, "GPU", seen, f"{most}", "check dmesg and nvidia-smi, and restart Ray")
        for gpu in answer["gpus"]:
            for seen, expected, advice in _gpu_faults(gpu):
                yield Finding(name, "GPU", f"GPU {gpu['index']}: {seen}", expected, advice)
        after = report["nodes"][name].get("gpus_after_work", {}).get("gpus", [])
        for gpu in [*answer["gpus"], *after]:
            if reasons := [text for bit, text in SLOWDOWNS.items() if (gpu["throttle_reasons"] or 0) & bit]:
                seen = f"GPU {gpu['index']}: {', '.join(reasons)}"
                slowed.setdefault(seen, Finding(name, "GPU", seen, "full clocks", "check cooling and power supply"))
        yield from slowed.values()
        for address, number in answer["xids"] or ():
            if number not in USER_XIDS:
                advice = "look the number up in NVIDIA's table of Xid errors; restart or replace"
                yield Finding(name, "GPU", f"Xid {number} of {address} in the kernel's log", "none", advice)


def _gpu_faults(gpu: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (seen, expected, advice) for each fault of one GPU."""
    if (gpu["memory_used"] or 0) > USED:
        seen = f"{format_gigabytes(gpu['memory_used'])} of memory in use"
        yield seen, f"less than {format_gigabytes(USED)}", "end the process that nvidia-smi shows"
    if (gpu["temperature"] or 0) > HOT:
        yield f"{gpu['temperature']} degrees without work", f"{HOT} at most", "check its cooling"
    if gpu["uncorrected_errors"]:
        yield (
            f"{gpu['uncorrected_errors']} uncorrected ECC errors",
            "none",
            "reset it, and replace it if they come back",
        )
    now, most = gpu["pcie_width"]
    if now is not None and most is not None and now < most:
        yield f"PCIe x{now}", f"x{most}", "reseat the card, and check the slot and the riser"


def _stores(report: ClusterReport) -> Iterator[Finding]:
    by_location: dict[str, dict[str, dict[str, Any]]] = {}
    for name, node in report["nodes"].items():
        for location, answer in node.get("stores", {}).items():
            by_location.setdefault(location, {})[name] = answer
    for location, answers in by_location.items():
        good = {name: each for name, each in answers.items() if "error" not in each}
        for name, each in answers.items():
            if "error" in each:
                other = f" (of {each['read_of']})" if "read_of" in each else ""
                advice = "give access, free space, or mount the same directory on all nodes"
                yield Finding(name, "store", f"{each['error']}{other}", f"{location} written and read", advice)
            elif not each["same"]:
                seen = f"content other than {each['read_of']} wrote to {location}"
                yield Finding(name, "store", seen, "the same content", "do not use this store")
        yield from _atomic(location, good)
        for what in ("write_rate", "read_rate"):
            median, below = find_slow({name: each[what] for name, each in good.items()}, SLOW_STORE)
            for name, value in below.items():
                seen = f"{what.partition('_')[0]} {location} at {format_rate(value)}"
                wanted = f"{SLOW_STORE:.0%} of the median of {format_rate(median)}"
                yield Finding(
                    name, "store", seen, wanted, "check its disk, its network and how the directory is mounted"
                )


def _atomic(location: str, answers: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """Check that at most one of the nodes that created one file at once succeeded, that all read its content, and that
    none can replace a version that it has not seen."""
    creators = sorted(name for name, each in answers.items() if each["created"])
    owners = {each["owner"] for each in answers.values()}
    advice = "use another store: on this one, two runs could own one directory"
    if len(creators) > 1:
        seen = f"each created a file in {location} that only one node may create"
        yield Finding(", ".join(creators), "store", seen, "one node at most", advice)
    elif len(owners) > 1 or (creators and owners != {answers[creators[0]]["node_file"]}):
        yield Finding(
            ", ".join(sorted(answers)), "store", f"different content of one file in {location}", "the same", advice
        )

    if blind := sorted(name for name, each in answers.items() if not each["compares"]):
        seen = f"a file in {location} is replaced whatever its version (If-Match is ignored)"
        yield Finding(", ".join(blind), "store", seen, "only the version that was seen", advice)


def _links(report: ClusterReport) -> Iterator[Finding]:
    groups: dict[tuple[int, str], dict[str, float]] = {}
    for link in report["links"]:
        name = " - ".join(link["nodes"])
        if "error" in link:
            advice = "check the network between them, firewalls, /etc/hosts, and the interface with Ray's address"
            yield Finding(name, "link", f"all-reduce failed: {link['error']}", "an answer", advice)
            continue
        for size, value in link["rates"].items():
            groups.setdefault((len(link["nodes"]), size), {})[name] = value
    largest = max((int(size) for _, size in groups), default=0)
    for (ends, size), rates in groups.items():
        median, below = find_slow(rates, SLOW_LINK) if int(size) == largest else (0.0, {})
        for name, value in below.items():
            scope = "within the node" if ends == 1 else "between them"
            seen = f"all-reduce of {int(size) // 2**20} MiB {scope} at {format_rate(value)}"
            wanted = f"{SLOW_LINK:.0%} of the median of {format_rate(median)}"
            yield Finding(
                name, "link", seen, wanted, "check cables, ports, the speed of the interface and what else uses it"
            )


def _tracking(report: ClusterReport) -> Iterator[Finding]:
    if "error" in report.get("tracking", {}):
        advice = "start the server, or correct tracking.uri or MLFLOW_TRACKING_URI"
        yield Finding(_head(report), "MLflow", report["tracking"]["error"], "an answer", advice)


def _step(report: ClusterReport) -> Iterator[Finding]:
    if "error" in report.get("step", {}):
        expected = "a step, a checkpoint, a restart and another step of the recipe"
        yield Finding("the cluster", "step", report["step"]["error"], expected, "fix this before the long run")


def _answers(report: ClusterReport, question: str) -> dict[str, dict[str, Any]]:
    """Return the answers to a question by node, without nodes that gave none."""
    answers = {name: node.get(question, {"error": "not requested"}) for name, node in report["nodes"].items()}
    return {name: answer for name, answer in answers.items() if "error" not in answer}


def _head(report: ClusterReport) -> str:
    return next((name for name, node in report["nodes"].items() if node["is_head"]), "")


def format_gigabytes(count: float) -> str:
    """Format a number of bytes, for example 1.2 GB."""
    return f"{count / 1e9:,.1f} GB"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate, for example 1,234 MB/s."""
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
