"""The parts of `python bench/scale_cluster.py` on n ranks: their rendezvous, and the driver that follows them.

The ranks are threads of a second process, which make the requests that gloo makes (recorded from ranks of torch 2.13
that connected their full mesh); the sockets, files and objects are real. Gloo's own connections are not made.
"""

import json
import multiprocessing
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import ray
import ray.util

from multihop.cluster.ray import watch
from multihop.cluster.ray.capacity import Capacity, ScaleUpPolicy
from multihop.cluster.remote.driver_mailbox import DriverMailbox
from multihop.cluster.remote.node_cache import RemoteRunSpec
from multihop.common.json_lines import RowFollower
from multihop.pretrain.engine.rendezvous import Endpoint, Listener, Store

if TYPE_CHECKING:
    from scale_cluster import Parts

PATIENCE = timedelta(minutes=30)
ADDRESS_BYTES = 156
"""Size of what gloo publishes for a rank."""
POLLS, ROWS = 5, 10_000
SEGMENTS, MERGED = 1_000, 1_000
"""Seconds of training for each rank, each with a segment of the journal; segments that the driver merges."""


def measure_rendezvous(size: int, parts: "Parts") -> None:
    """Measure how `size` ranks connect to the store of rank 0, exchange gloo's addresses, and get the nonce."""
    listener = Listener(Endpoint("127.0.0.1", 0, secrets.token_bytes(32)))
    requests = count_requests(listener)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=join, args=(listener.endpoint, size, there))
    process.start()
    for part in ("connect to rank 0", "exchange addresses, as gloo does", "get the nonce"):
        assert here.recv() == "ready"
        before = len(requests)
        with parts.of(f"rank 0: {part}"):
            here.send("go")
            cpu_s = here.recv()
        parts.rows.append({**parts.rows[-1], "part": f"all other ranks: {part}", "cpu_s": cpu_s})
        parts.number(f"requests: {part}", len(requests) - before)
    process.join()


def count_requests(listener: Listener) -> list[str]:
    """Return a list to which the method of each request is appended."""
    requests: list[str] = []
    handle = listener._handle

    def counted(method: str, *values: object) -> object:
        requests.append(method)
        return handle(method, *values)

    listener._handle = counted  # type: ignore[method-assign]
    return requests


def join(endpoint: Endpoint, size: int, driver: Connection) -> None:
    """Do what the ranks do, in three parts, each when the driver asks for it; answers with its CPU seconds."""
    stores: dict[int, Store] = {}
    keys = [f"default_pg//cpu//0/{rank}" for rank in range(size)]

    def connect(rank: int) -> None:
        stores[rank] = Store(endpoint, PATIENCE)

    def exchange(rank: int) -> None:
        stores[rank].set(keys[rank], os.urandom(ADDRESS_BYTES))
        if stores[rank].has_extended_api():
            stores[rank].multi_get(keys)
            return
        for key in keys:
            stores[rank].wait([key])
            stores[rank].get(key)

    def get_nonce(rank: int) -> None:
        if rank == 0:
            stores[rank].set("nonce", secrets.token_bytes(32))
        stores[rank].get("nonce")

    for part in (connect, exchange, get_nonce):
        driver.send("ready")
        assert driver.recv() == "go"
        started = time.process_time()
        run_in_threads(part, size)
        driver.send(time.process_time() - started)


def run_in_threads(function: Callable[[int], None], size: int) -> None:
    """Call `function` with each rank at the same time, and wait."""
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            function(rank)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def measure_driver(size: int, parts: "Parts") -> None:
    """Measure what the driver does in each poll of `size` ranks on as many nodes, all of which answer.

    Ray's tables of the nodes and of the placed ranks are made up, since this machine holds no such cluster; the nodes'
    ports, which the driver connects to, are real. No rank sends anything to the driver: their watchdogs are their own,
    and the rows that it follows are those of rank 0, whatever the number of ranks.
    """
    with nodes_that_listen(size) as table, tempfile.TemporaryDirectory(prefix="scale-driver-") as folder:
        ray.nodes = lambda: table
        ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "01000000")
        free = {node["NodeID"]: {"CPU": 0.0} for node in table}
        bundles = dict(enumerate(free))
        group = {
            "state": "CREATED",
            "bundles_to_node_id": bundles,
            "bundles": {bundle: {"CPU": 1} for bundle in bundles},
        }
        ray.util.placement_group_table = lambda: {"f" * 28 + "01000000": group}
        ray._private.state.state = SimpleNamespace(
            available_resources_per_node=lambda: free, get_draining_nodes=lambda: {}, disconnect=lambda: None
        )
        with parts.of("connect to every node, once a second", POLLS):
            for _ in range(POLLS):
                assert not watch.unreachable_nodes()
        capacity = Capacity(1, size)
        with parts.of("count room and ranks, twice a second", POLLS):
            for _ in range(POLLS):
                assert capacity.room(watch.draining_nodes()) == size
                assert len(watch.ranks_by_node()) == size
        measure_rows(Path(folder), parts)
        measure_mailbox(Path(folder), size * SEGMENTS, parts)


@contextmanager
def nodes_that_listen(number: int) -> Iterator[list[dict[str, object]]]:
    """Yield rows of Ray's table of nodes, each with a port that accepts connections."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64)) for _ in range(number)]
        yield [
            {
                "NodeID": f"{index:056x}",
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": server.getsockname()[1],
                "Resources": {"CPU": 1.0},
            }
            for index, server in enumerate(servers)
        ]


def measure_rows(folder: Path, parts: "Parts") -> None:
    """Measure what the driver does with a row of metrics.jsonl."""
    metrics = dict.fromkeys(("loss", "mlm_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "data_wait"), 0.5)
    rows = (json.dumps({"step": step, "time": float(step), **metrics}) + "\n" for step in range(ROWS))
    (folder / "metrics.jsonl").write_text("".join(rows))
    policy, follower = ScaleUpPolicy(ROWS), RowFollower(folder / "metrics.jsonl")
    with parts.of("follow a row of metrics", ROWS):
        for row in follower.read():
            policy.observe(row)


def measure_mailbox(folder: Path, seconds: int, parts: "Parts") -> None:
    """Measure a poll of the journal in an object store, here a folder, after `seconds` with a row each."""
    spec = RemoteRunSpec(str(folder / "store"), "run", "data")
    journal = folder / "store" / "run" / "journal"
    journal.mkdir(parents=True)
    row = json.dumps({"step": 1, "loss": 0.5}) + "\n"
    merged = max(0, seconds - 1) // MERGED
    for first in range(0, merged * MERGED, MERGED):
        (journal / f"00000001-{first:08d}_{first + MERGED - 1:08d}.metrics.jsonl").write_text(row * MERGED)
    for number in range(merged * MERGED, seconds):
        (journal / f"00000001-{number:08d}.metrics.jsonl").write_text(row)
    local = folder / "local"
    local.mkdir()
    with parts.of(f"after {SEGMENTS} n seconds: read the journal"):
        mailbox = DriverMailbox(local, spec)
    with parts.of(f"after {SEGMENTS} n seconds: poll it, twice a second", POLLS):
        for _ in range(POLLS):
            mailbox.poll()
