"""A task that does not fit into its node's memory: Ray kills it before the kernel kills another process."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from workplace import json_lines

ROOM = 2 * 2**30
"""Number of bytes that must be free, or Ray kills a task."""
CHILD = f"""
import json, sys, time
from multihop.cluster.ray.map import map_on_ray
from multihop.cluster.ray.session import ray_session

def need(blocks):
    kept = []
    for _ in range(blocks):
        kept.append(b"x" * 2**28)
        time.sleep(0.1)
    return sum(map(len, kept))

with ray_session(None, 1):
    for found in map_on_ray(need, [1, {ROOM // 2**28 + 16}, 2], on_death=lambda item, error: str(error)):
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(found) + "\\n")
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_it_is_tried_again_and_reported_and_the_others_are_done(tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    if memory.available < 4 * ROOM:
        pytest.skip(f"this machine has {memory.available / 1e9:.0f} GB of memory free, and the test takes 8")
    threshold = (memory.total - memory.available + ROOM) / memory.total
    environment = {
        **os.environ,
        "RAY_memory_usage_threshold": f"{threshold:.4f}",
        "RAY_memory_monitor_refresh_ms": "50",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "found")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json_lines(tmp_path / "found")
    messages = [each for each in result if isinstance(each, str)]
    assert sorted(each for each in result if each not in messages) == [2**28, 2**29]
    assert len(messages) == 1 and "died 4 times, probably out of memory" in messages[0], messages
