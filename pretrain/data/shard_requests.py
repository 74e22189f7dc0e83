"""Shards that come while training goes on: what ranks need is written down, and fetched by who started them.

Where nodes share only an object store and samples are shuffled by windows of shards (see
`multihop.pretrain.data.shard_windows`), a node has only the shards that the ranks' steps need, and those of the next
windows. `WANTED` in the run directory names them. Each process that makes batches writes it when its steps need others:
all write the same, some steps apart.
"""

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from multihop.common.files import read_json_object, write_atomically

WANTED = "shards-wanted.json"
_POLL_S = 0.05
_TOLD_AFTER_S = 10.0

log = logging.getLogger("multihop")


def await_shard(path: Path) -> None:
    """Return when a shard is there. What never comes is for the watchdog: the run's hang_timeout_s ends the wait."""
    since, told = time.monotonic(), False
    while not path.exists():
        if not told and time.monotonic() - since > _TOLD_AFTER_S:
            log.warning("%s is needed and not fetched yet; waiting", path.name)
            told = True
        time.sleep(_POLL_S)


def request(run_dir: Path, shards: Iterable[str]) -> None:
    """Ask for shards by their file names, in the order in which they will be needed. Others may be removed."""
    write_atomically(run_dir / WANTED, json.dumps({"shards": list(shards)}).encode())


def requested(run_dir: Path) -> list[str]:
    """What `request` asked for last; empty before."""
    try:
        return list(read_json_object(run_dir / WANTED)["shards"])
    except FileNotFoundError:
        return []


def forget(run_dir: Path) -> None:
    """Requests of earlier ranks count no more."""
    (run_dir / WANTED).unlink(missing_ok=True)
