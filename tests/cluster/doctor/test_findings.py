"""Each fault is found, with the name of its node, and nothing else is reported."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from cluster_facts import healthy
from hypothesis import given
from hypothesis import strategies as st

from multihop.cluster.doctor.findings import CLOCK_S, SLOW_DEVICE, find_differing, find_slow, findings

Report = dict[str, Any]
LARGEST = "67108864"


def found(report: Report) -> list[tuple[str, str]]:
    return [(finding.node, finding.check) for finding in findings(report)]


def put(*path: Any, value: Any) -> Callable[[Report], None]:
    def change(report: Report) -> None:
        at: Any = report
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def of(node: str, *path: Any, value: Any) -> Callable[[Report], None]:
    return put("nodes", node, *path, value=value)


def disk(total: int, free: int) -> dict[str, Any]:
    return {"path": "/runs", "total": total, "free": free}


FAULTS: dict[str, tuple[Callable[[Report], Any], tuple[str, str]]] = {
    "another torch": (of("two", "machine", "versions", "torch", value="2.9.0"), ("two", "version")),
    "another torch on the head": (of("one", "machine", "versions", "torch", value="2.9.0"), ("one", "version")),
    "a package missing": (of("two", "machine", "versions", "python", value=None), ("two", "version")),
    "a package too many": (of("two", "machine", "versions", "mlflow", value="3.17"), ("two", "version")),
    "other code": (of("three", "machine", "code", value="d" * 64), ("three", "version")),
    "no code": (of("three", "machine", "code", value=None), ("three", "version")),
    "another CUDA": (of("three", "compute", "cuda", value="12.6"), ("three", "version")),
    "another NCCL": (of("three", "compute", "nccl", value=None), ("three", "version")),
    "a variable missing": (of("two", "machine", "missing_variables", value=["AWS_PROFILE"]), ("two", "environment")),
    "few bytes free": (of("two", "machine", "disks", 0, value=disk(10**10, 10**9)), ("two", "disk")),
    "a small share free": (of("two", "machine", "disks", 0, value=disk(10**13, 10**11)), ("two", "disk")),
    "no memory": (of("two", "machine", "memory", "available", value=10**9), ("two", "memory")),
    "a container's shm": (of("two", "machine", "shm", value={"total": 2**26, "free": 2**26}), ("two", "shm")),
    "few open files": (of("two", "machine", "open_files", value=1024), ("two", "open files")),
    "a fast clock": (of("two", "clock", "ahead", value=5.0), ("two", "clock")),
    "a slow clock": (of("two", "clock", "ahead", value=-5.0), ("two", "clock")),
    "a wrong clock of the head": (
        lambda report: [of(name, "clock", "ahead", value=9.0)(report) for name in ("two", "three")],
        ("one", "clock"),
    ),
    "a slow processor": (of("two", "compute", "devices", 0, "flops", value=1e11), ("two", "compute")),
    "a wrong product": (of("two", "compute", "devices", 0, "wrong", value=1), ("two", "compute")),
    "silence": (of("two", "machine", value={"error": "no answer within 120 s"}), ("two", "machine")),
    "torch is broken": (of("two", "compute", value={"error": "ImportError: libcudart"}), ("two", "compute")),
    "no access": (of("two", "stores", "/runs", value={"error": "PermissionError: /runs"}), ("two", "store")),
    "not shared": (
        of("two", "stores", "/runs", value={"created": True, "error": "FileNotFoundError", "read_of": "three"}),
        ("two", "store"),
    ),
    "damaged": (of("two", "stores", "/runs", "same", value=False), ("two", "store")),
    "not atomic": (of("two", "stores", "/runs", "created", value=True), ("one, two", "store")),
    "versions ignored": (of("two", "stores", "/runs", "compares", value=False), ("two", "store")),
    "two owners": (of("two", "stores", "/runs", "owner", value="b"), ("one, three, two", "store")),
    "slow to write": (of("two", "stores", "/runs", "write_rate", value=1e8), ("two", "store")),
    "slow to read": (of("two", "stores", "/runs", "read_rate", value=1e8), ("two", "store")),
    "a cut link": (put("links", 3, value={"nodes": ["one", "two"], "error": "no answer"}), ("one - two", "link")),
    "a slow link": (
        lambda report: report["links"].append({"nodes": ["three", "one"], "rates": {"4096": 1e7, LARGEST: 1e8}}),
        ("three - one", "link"),
    ),
    "a slow node within": (put("links", 2, "rates", LARGEST, value=1e8), ("three", "link")),
    "MLflow is away": (put("tracking", value={"error": "refused"}), ("one", "MLflow")),
    "no step": (put("step", value={"error": "CUDA out of memory"}), ("the cluster", "step")),
    "too few nodes": (put("needs", "ranks", value=25), ("the cluster", "capacity")),
    "other jobs": (
        lambda report: [of(name, "free", "cpus", value=0)(report) for name in ("one", "two", "three")],
        ("the cluster", "capacity"),
    ),
    "a node was lost": (put("lost", value=["four (10.0.0.4)"]), ("four (10.0.0.4)", "node")),
}
"""Changes of a healthy report, each with the one finding that it must lead to."""


def test_a_healthy_cluster_has_no_findings() -> None:
    assert found(healthy()) == found(healthy(("alone",))) == found(healthy(gpu=True)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_node(fault: str) -> None:
    change, expected = FAULTS[fault]
    report = healthy()
    change(report)
    assert found(report) == [expected]


GPU_FAULTS = {
    "memory in use": ("gpus_idle", "memory_used", 20 * 2**30),
    "heat": ("gpus_idle", "temperature", 95),
    "ECC": ("gpus_idle", "uncorrected_errors", 3),
    "throttling under load": ("gpus_after_work", "throttle_reasons", 0x41),
    "throttling when idle": ("gpus_idle", "throttle_reasons", 0x08),
    "PCIe": ("gpus_idle", "pcie_width", [8, 16]),
}


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_a_fault_of_a_gpu_is_found(fault: str) -> None:
    question, key, value = GPU_FAULTS[fault]
    report = healthy(gpu=True)
    report["nodes"]["two"][question]["gpus"][0][key] = value
    assert found(report) == [("two", "GPU")]
    report["nodes"]["two"][question]["gpus"][0][key] = None if key != "pcie_width" else [None, None]
    assert found(report) == []  # what a GPU does not report is no fault


def test_gpus_that_are_missing_and_messages_of_the_driver_are_found() -> None:
    report = healthy(gpu=True)
    report["nodes"]["two"]["gpus_idle"]["gpus"] = []
    report["nodes"]["three"]["gpus_idle"]["xids"] = [["0000:3b:00", 79], ["0000:3b:00", 31]]
    assert found(report) == [("two", "GPU"), ("three", "GPU")]
    report = healthy(gpu=True)
    report["nodes"]["two"]["gpus"] = 0
    assert ("two", "capacity") in found(report)


def test_of_two_nodes_the_head_counts_as_right() -> None:
    report = healthy(("head", "other"))
    report["nodes"]["other"]["clock"]["ahead"] = 3.0
    report["nodes"]["other"]["machine"]["versions"]["torch"] = "2.9.0"
    assert set(found(report)) == {("other", "clock"), ("other", "version")}


def test_a_clock_that_could_not_be_read_exactly_is_not_accused() -> None:
    report = healthy()
    report["nodes"]["two"]["clock"] = {"ahead": CLOCK_S + 1, "uncertainty": 1.5}
    assert found(report) == []


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1), st.randoms())
def test_those_who_differ_are_a_minority(values: list[str | None], rng: random.Random) -> None:
    nodes = {f"node-{number}": value for number, value in enumerate(values)}
    usual, others = find_differing(nodes, head="node-0")
    assert 2 * len(others) <= len(values) or len(set(values)) > 2
    assert {**{name: usual for name in nodes}, **others} == nodes
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    if 2 * len(others) != len(values) and len(set(values)) < 3:
        assert find_differing({name: nodes[name] for name in shuffled}, head="node-0") == (usual, others)


@given(st.lists(st.floats(min_value=1.0, max_value=1e15), min_size=1))
def test_fewer_than_half_are_slow_and_none_where_all_are_alike(rates: list[float]) -> None:
    _, below = find_slow(dict(enumerate(rates)), SLOW_DEVICE)
    assert 2 * len(below) <= len(rates)
    assert all(rates[key] < SLOW_DEVICE * max(rates) for key in below)
    assert find_slow(dict.fromkeys(range(len(rates)), rates[0]), SLOW_DEVICE)[1] == {}


@given(st.permutations(["one", "two", "three", "four"]), st.sampled_from(sorted(FAULTS)))
def test_findings_do_not_depend_on_the_order_of_the_nodes(order: list[str], fault: str) -> None:
    report = healthy(("one", "two", "three", "four"))
    FAULTS[fault][0](report)
    shuffled = deepcopy(report) | {"nodes": {name: report["nodes"][name] for name in order}}
    assert sorted(map(repr, findings(shuffled))) == sorted(map(repr, findings(report)))
