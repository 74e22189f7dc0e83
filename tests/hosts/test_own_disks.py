"""Two hosts with disks of their own, and a third that is their only store: slow, failing, cutting uploads, and away."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_runs import RAY, wait_for
from network_hosts import Hosts
from workplace import begin, ended, json_lines, losses, make_workplace

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two hosts"),
    pytest.mark.skipif(
        Path(__file__).is_relative_to("/tmp"), reason="a host with its own /tmp cannot see this checkout"
    ),
]
STEPS = 600
RECIPE = ["cluster.workers=2", "model.dropout=0"]
_PORT = 9000


def test_they_train_as_on_one_disk(three_hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    hosts, store = three_hosts, f"http://{three_hosts.addresses[2]}:{_PORT}"
    make_workplace(tmp_path, texts.absolute(), "apart", STEPS)
    ended(tmp_path, begin(tmp_path, "train", "recipe.yaml", *RECIPE, "name=local"))
    local = tmp_path / "runs" / "local"

    disk = hosts.give_disk(1)
    cache, output = tmp_path / "cache", tmp_path / "output.txt"
    server = [sys.executable, str(Path(__file__).parents[1] / "support" / "s3_endpoint.py")]
    hosts.start(2, [*server, hosts.addresses[2], str(_PORT), "10", "7"], tmp_path / "store.txt")
    access = {
        **RAY,
        "AWS_ENDPOINT_URL": store,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-theirs",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    make = "import boto3; boto3.client('s3').create_bucket(Bucket='home')"
    wait_for(lambda: hosts.start(0, [sys.executable, "-c", make], output, **access).wait() == 0, output)
    # Another number of threads is another rounding.
    for host, caches in enumerate((str(cache), "/tmp/cache")):
        started = tmp_path / f"ray-start-{host}.txt"
        hosts.start_ray(host, started, cpus=1, one_core=True, XDG_CACHE_HOME=caches, **access)

    command = [sys.executable, "-m", "multihop.cluster.cli.main", "train", str(tmp_path / "recipe.yaml"), *RECIPE]
    place = ["--runs", "s3://home/runs", "--address", f"{hosts.addresses[0]}:6379"]

    def train() -> subprocess.Popen[bytes]:
        return hosts.start(0, [*command, *place], output, XDG_CACHE_HOME=str(cache), **access)

    hosts.slow_down(2, delay_s=0.05, loss=0.0)
    driver = train()
    wait_for(lambda: len(list(cache.glob("multihop/remote-runs/*/apart/metrics.jsonl"))) == 1, output)
    (copy,) = cache.glob("multihop/remote-runs/*/apart")
    wait_for(lambda: max(losses(copy), default=0) > 30, output)
    hosts.speed_up(2)

    hosts.unplug(2)
    time.sleep(60)
    hosts.plug_in(2)
    seen = max(losses(copy))
    wait_for(lambda: max(losses(copy)) > seen + 30, output)
    # The store and the driver are lost at once; the driver's lease outlives it by a minute.
    hosts.unplug(2)
    driver.kill()
    driver.wait()
    time.sleep(5)
    hosts.plug_in(2)
    seen = max(losses(copy))
    driver = train()
    wait_for(lambda: len(json_lines(copy / "launches.jsonl")) == 2 and max(losses(copy)) > seen, output)
    driver.terminate()
    assert driver.wait(timeout=100) == 75, output.read_text()

    # Both disks are lost; what is in the store is enough.
    shutil.rmtree(cache)
    shutil.rmtree(disk / "cache")
    assert train().wait(timeout=900) == 0, output.read_text()
    (copy,) = cache.glob("multihop/remote-runs/*/apart")
    assert losses(copy) == losses(local)
    assert len(json_lines(copy / "launches.jsonl")) == 3
    assert (copy / "data" / "manifest.json").read_bytes() == (local / "data" / "manifest.json").read_bytes()
    assert list((disk / "cache").rglob("*.arrow")), "the second host has fetched the shards to its own disk"
    assert json.loads((copy / "summary.json").read_text())["status"] == "trained"
