"""Measure training throughput with and without the driver tracking it in MLflow: `python bench/tracking.py`.

A process trains, and after each step a row of its metrics is written, as with `engine.log_interval: 1`: no run can log
more. This process is the driver, on the same machine, which is the worst case too. Blocks of steps with and without the
driver's thread that follows the file take turns. Besides the ratio of their speeds, the script prints the CPU time of
the driver, which depends less on other work on the machine.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace

from step import case_of, start_peer

from multihop.cluster.tracking.tracker import open_run

METRICS = ("loss", "mlm_loss", "nsp_loss", "lr", "grad_norm", "samples", "tokens", "skipped", "tokens_per_s", "mfu")
"""Names of the metrics in a row of a run."""


def main() -> None:
    """Print the ratio and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", default=None, help="MLflow's tracking URI; default: a new SQLite store")
    parser.add_argument("--shape", default="bert-mini:128", help="MODEL:LENGTH, as in bench/step.py")
    parser.add_argument("--seconds", type=float, default=10, help="of a block; rows are looked for every 2")
    parser.add_argument("--repeats", type=int, default=10, help="blocks of each kind")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the training")
    parser.add_argument("--json", type=Path, default=Path("bench/results/tracking.json"))
    options = parser.parse_args()
    shape = SimpleNamespace(tokens=4096, dropout=0.1, precision="fp32", threads=options.threads, compile=False)
    with (
        tempfile.TemporaryDirectory(prefix="tracking-") as folder,
        start_peer("ours", case_of(options.shape, shape)) as step,
    ):
        rates, cores = measure(Path(folder) / "run", options.uri, step, options.seconds, options.repeats)
    ratios = sorted(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "shape": options.shape,
        "store": "SQLite" if options.uri is None else options.uri.partition(":")[0],
        "steps_per_s": rates,
        "driver_cores": cores,
        "throughput_on_of_off": statistics.median(ratios),
        "from_to": [ratios[0], ratios[-1]],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']}; {options.shape}; {report['store']}; {options.repeats} blocks of each kind in turns")
    print(f"steps/s without tracking  {statistics.median(rates['off']):8.2f}")
    print(f"steps/s with tracking     {statistics.median(rates['on']):8.2f}")
    print(f"driver's CPU cores, with  {statistics.median(cores['on']):8.4f}")
    print(f"                 without  {statistics.median(cores['off']):8.4f}")
    print(f"ratio of a pair of blocks {statistics.median(ratios):8.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def measure(
    run_dir: Path, uri: str | None, step: Callable[[], float], seconds: float, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return steps per second and the driver's busy cores in each block, with tracking on and off.

    The first pair of blocks warms up and is left out.
    """
    run_dir.mkdir()
    tracker = open_run(run_dir, {"name": "bench"}, uri, "bench", {})
    rates: dict[str, list[float]] = {"on": [], "off": []}
    cores: dict[str, list[float]] = {"on": [], "off": []}
    number = 0
    for turn in range(repeats + 1):
        for kind in ("on", "off") if turn % 2 else ("off", "on"):
            times: list[float] = []
            cpu = time.process_time()
            file = run_dir / ("metrics.jsonl" if kind == "on" else "unread.jsonl")
            with open(file, "a") as metrics, tracker.follow_metrics() if kind == "on" else nullcontext():
                while sum(times) < seconds:
                    times.append(step())
                    number += 1
                    row = {"step": number, **dict.fromkeys(METRICS, times[-1]), "time": time.time()}
                    metrics.write(json.dumps(row) + "\n")
                    metrics.flush()
            if turn:
                rates[kind].append(len(times) / sum(times))
                cores[kind].append((time.process_time() - cpu) / sum(times))
    tracker.close("done")
    if tracker.error is not None:
        raise SystemExit(f"MLflow was not reachable, so nothing was compared: {tracker.error}")
    return rates, cores


if __name__ == "__main__":
    main()
