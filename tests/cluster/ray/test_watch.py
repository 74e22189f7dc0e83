"""The driver's watch on nodes if the driver itself was unresponsive."""

import os
import signal
import subprocess
import sys
import time

import pytest
from workplace import ROOT

pytestmark = [pytest.mark.long]
WATCHES = """
import time
from multihop.cluster.ray.session import start_ray
from multihop.cluster.ray.watch import watch_nodes
start_ray(num_cpus=1)
with watch_nodes() as watch:
    time.sleep(3)
    print("watches", flush=True)
    until = time.monotonic() + 18
    unresponsive = set()
    while time.monotonic() < until:
        unresponsive |= watch.unresponsive()
    print(len(unresponsive), flush=True)
"""


def test_after_a_pause_of_the_driver_no_node_counts_as_silent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.Popen([sys.executable, "-c", WATCHES], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline() == "watches\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(12)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "0\n"
    finally:
        child.kill()
