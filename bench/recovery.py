"""Measure the seconds without training after a fault, by part: `python bench/recovery.py`.

Two hosts (network namespaces of this machine, which needs root and iproute2) with a Ray node each train a tiny model
with a rank on each. Then a rank is killed; a host loses its power, and the run continues with one rank; the host comes
back, and the run is restarted with two. For each fault, the script measures the seconds until the next step that is in
the metrics, and the parts of the launch in between. tests/hosts checks losses and steps; this script measures time.

The hosts share the cores and the disk of this machine, and Python's modules are in the page cache.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from network_hosts import Hosts  # noqa: E402

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32}
PATIENCE_S = 180
SETTLED_S = 30.0
"""Seconds of training between faults, in which standby processes import their packages."""


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench/results/recovery.json"))
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        hosts = Hosts(2)
        try:
            with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
                results += measure(hosts, Path(folder))
        finally:
            hosts.remove()
        print(f"{repeat + 1} of {options.repeats} done", file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "repeats": options.repeats,
        "results": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    parts = list(dict.fromkeys(part for result in results for part in result["parts"]))
    print(f"{report['machine']}; medians of {options.repeats}, seconds\n")
    print(f"| | without training | {' | '.join(parts)} |\n|---{'|---' * (len(parts) + 1)}|")
    for fault in dict.fromkeys(result["fault"] for result in results):
        alike = [result for result in results if result["fault"] == fault]
        whole = [result["seconds"] for result in alike]
        cells = [f"{statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"]
        cells += [f"{statistics.median(each['parts'].get(part, 0.0) for each in alike):.1f}" for part in parts]
        print(f"| {fault} | {' | '.join(cells)} |")


def measure(hosts: Hosts, folder: Path) -> list[dict[str, Any]]:
    """Cause each fault once, in one run; returns a row for each."""
    run = folder / "runs" / "recovery"
    write_recipe(folder)
    for host in (0, 1):
        hosts.start_ray(host, folder / "ray.txt", cpus=1, **TOKEN)
    command = [sys.executable, "-m", "multihop.cluster.cli.main", "train", str(folder / "recipe.yaml")]
    options = ["--runs", str(folder / "runs"), "--address", f"{hosts.addresses[0]}:6379"]
    driver = hosts.start(0, [*command, *options], folder / "output.txt", **TOKEN)
    found = []

    def fault(name: str, ranks: int, happen: Callable[[], None]) -> None:
        wait_until(lambda: len(rows(run)) > 0 and rows(run)[-1]["time"] > started + SETTLED_S, driver, folder)
        before, starts = rows(run)[-1]["step"], len(json_lines(run / "launches.jsonl"))
        at = time.time()
        happen()
        wait_until(lambda: len(json_lines(run / "launches.jsonl")) > starts, driver, folder)
        wait_until(lambda: rows(run)[-1]["time"] > json_lines(run / "launches.jsonl")[-1]["time"], driver, folder)
        start = json_lines(run / "launches.jsonl")[-1]
        assert start["world_size"] == ranks, start
        first = next(row for row in rows(run) if row["time"] > start["time"])
        last = max(row["time"] for row in rows(run) if row["time"] < start["time"])
        # Training continues while a host comes back: the run loses only the seconds between its last step and the next.
        seconds = first["time"] - (last if name == BACK else at)
        found.append({"fault": name, "seconds": round(seconds, 2), "after_step": before, "parts": start["seconds"]})

    wait_until(lambda: len(rows(run)) > 0, driver, folder)
    for name, ranks, happen in (
        ("a rank is killed", 2, lambda: rank_on(hosts, 1, run).send_signal(signal.SIGKILL)),
        ("a host loses its power", 1, lambda: hosts.lose_power(1)),
        (BACK, 2, lambda: power_on(hosts, folder)),
    ):
        started = time.time()
        fault(name, ranks, happen)
    driver.terminate()
    driver.wait(timeout=PATIENCE_S)
    return found


BACK = "the host comes back"


def power_on(hosts: Hosts, folder: Path) -> None:
    """Restore the network of the second host and start its Ray node."""
    hosts.restore_power(1)
    hosts.start_ray(1, folder / "ray.txt", cpus=1, **TOKEN)


def write_recipe(folder: Path) -> None:
    """Write the recipe of a tiny GPT-2 that trains for hours, on this project's own documentation."""
    (folder / "texts").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (folder / "texts" / f"{page.stem}.txt").write_text(page.read_text())
    recipe = {
        "name": "recovery",
        "data": {"sources": [{"path": str(folder / "texts")}], "heldout_fraction": 0.1},
        "tokenizer": {"vocab_size": 500, "special_tokens": "gpt2"},
        "model": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "max_positions": 64},
        "objective": {"name": "clm"},
        "phases": [{"seq_len": 64, "global_batch_size": 8, "steps": 1_000_000, "lr": 1e-3}],
        "engine": {"deepspeed": {}, "micro_batch_size": 4, "log_interval": 1, "eval_interval": 1_000_000},
        "checkpoint": {"save_interval": 100},
        "cluster": {"workers": [1, 2]},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def rank_on(hosts: Hosts, host: int, run: Path) -> psutil.Process:
    """Return the rank of a host, which is a process of its own in the first launch of a run."""
    return next(
        each for each in hosts.processes(host) if each.cmdline()[-2:] == ["multihop.pretrain.run.worker", str(run)]
    )


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; none if it does not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that report a step."""
    return [row for row in json_lines(run / "metrics.jsonl") if "loss" in row]


def wait_until(happened: Callable[[], Any], driver: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait until `happened()` is true; fails if the driver ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if driver.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "output.txt").read_text())
        time.sleep(0.2)


if __name__ == "__main__":
    main()
