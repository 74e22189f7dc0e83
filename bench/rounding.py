"""Measure how runs diverge that differ in the order of sums: python bench/rounding.py --picture docs/rounding.png

A recipe is trained on one rank with twice its micro-batch size, on two ranks with its own, and on one rank with half of
it, each from step 0: the samples of a step are the same, and the sums over them differ only in their order and thus in
rounding. Every rank has one thread, so that threads do not change the order of sums.
Then one step on two ranks is taken from some of the first run's checkpoints: its loss and gradient norm differ by the
rounding of a single step, however far the runs have drifted apart by then.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from multihop.cluster.runs.recipe import load_recipe
from multihop.common.files import write_atomically
from multihop.common.json_lines import Row, read_rows
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.run.files import ROWS, STOP_FILE

EVERY = 5
"""Steps between the checkpoints of the first run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.yaml"), help="without dropout, in fp32")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--at", type=int, nargs="+", default=[5, 15, 40, 100, 200], help="steps to take one step from")
    parser.add_argument(
        "--work", type=Path, help="directory for the runs; finished ones are reused; default: temporary"
    )
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path, default=Path("bench/results/rounding.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rounding-") as temporary:
        report = measure(options, options.work or Path(temporary))
    show(report)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(report, indent=1).encode())
    if options.picture is not None:
        draw(options.picture, report)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    given = load_recipe(options.recipe, []).engine.micro_batch_size
    assert isinstance(given, int), "a number of samples"
    first = f"1 rank, micro-batch {2 * given}"
    saves = [f"checkpoint.save_interval={EVERY}", "checkpoint.keep=1000"]
    variants: dict[str, tuple[int, list[str]]] = {
        first: (1, [f"engine.micro_batch_size={2 * given}", *saves]),
        f"2 ranks, micro-batch {given}": (2, []),
        f"1 rank, micro-batch {given // 2}": (1, [f"engine.micro_batch_size={given // 2}"]),
    }
    curves = {}
    for number, (name, (ranks, overrides)) in enumerate(variants.items()):
        run_dir = work / f"run-{number}"
        if options.steps not in steps_of(run_dir):
            train(prepare(options, work, run_dir.name, overrides), ranks)
        curves[name] = steps_of(run_dir)
        print(f"{name}: {len(curves[name])} steps", file=sys.stderr)
    origin, one_step = work / "run-0", {}
    for at in options.at:
        run_dir = work / f"from-{at}"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(origin, run_dir, symlinks=True, ignore=shutil.ignore_patterns("checkpoints", *ROWS, "logs"))
        shutil.copytree(
            folder_of_step(str(origin / "checkpoints"), at), folder_of_step(str(run_dir / "checkpoints"), at)
        )
        (run_dir / STOP_FILE).touch()  # stops the run after its first step
        train(run_dir, 2)
        one_step[at + 1] = steps_of(run_dir)[at + 1]
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {version('torch')}",
        "recipe": str(options.recipe),
        "steps": options.steps,
        "first": first,
        "loss": {name: {step: row["loss"] for step, row in curve.items()} for name, curve in curves.items()},
        "grad_norm": {step: row["grad_norm"] for step, row in curves[first].items()},
        "one_step": {
            step: {key: abs(row[key] / curves[first][step][key] - 1) for key in ("loss", "grad_norm")}
            for step, row in one_step.items()
        },
    }


def prepare(options: argparse.Namespace, work: Path, name: str, overrides: list[str]) -> Path:
    """Make a new run directory with its recipe and the data, which is prepared once."""
    every = [f"name={name}", f"phases[0].steps={options.steps}", "engine.log_interval=1", *overrides]
    data, run_dir = work / "prepared", work / name
    if not data.exists():
        command = [sys.executable, "-m", "multihop.cluster.cli.main", "prep", str(options.recipe), "--runs", str(work)]
        subprocess.run([*command, f"name={data.name}"], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    (run_dir / "data").symlink_to((data / "data").resolve())
    (run_dir / "recipe.json").write_text(load_recipe(options.recipe, every).model_dump_json())
    return run_dir


def train(run_dir: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run(
        [*command, "-m", "multihop.pretrain.run.worker", str(run_dir)], env=environment, capture_output=True
    )
    assert code.returncode == 0 or (run_dir / STOP_FILE).exists(), code.stderr.decode()[-2000:]


def steps_of(run_dir: Path) -> dict[int, Row]:
    return {row["step"]: row for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row}


def differences(report: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return the relative difference of each later run's loss from the first run's, by step."""
    first = report["loss"][report["first"]]
    return {
        name: {step: abs(loss / first[step] - 1) for step, loss in curve.items()}
        for name, curve in report["loss"].items()
        if name != report["first"]
    }


def show(report: dict[str, Any]) -> None:
    found, norms = differences(report), report["grad_norm"]
    at = [step for step in (1, 10, 15, 16, 20, 40, 100, 250, report["steps"]) if step in norms]
    print(f"{report['recipe']}, {report['machine']}: difference of the loss from {report['first']}, relative")
    print(f"{'step':>6} {'grad norm':>10}  " + "  ".join(f"{name:>28}" for name in found))
    for step in dict.fromkeys(at):
        print(f"{step:6} {norms[step]:10.2f}  " + "  ".join(f"{curve[step]:28.1e}" for curve in found.values()))
    print("one step on 2 ranks from the same checkpoint:")
    for step, row in report["one_step"].items():
        print(f"{step:6}  loss {row['loss']:.1e}  gradient norm {row['grad_norm']:.1e}")


def draw(path: Path, report: dict[str, Any]) -> None:
    """Draw the differences by step on a logarithmic axis, above the norms of the gradient."""
    from matplotlib.figure import Figure

    from multihop.eval.report.plot_style import PAPER, as_png, style

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    drifting = {name: curve for name, curve in differences(report).items() if any(curve.values())}
    for (name, curve), color in zip(drifting.items(), PAPER.series, strict=False):
        upper.plot(list(curve), [value or float("nan") for value in curve.values()], color=color, label=name)
    single = {step: row["loss"] for step, row in report["one_step"].items() if row["loss"]}
    if single:
        upper.plot(
            list(single), list(single.values()), "o", color=PAPER.ink, label="one step on 2 ranks, same checkpoint"
        )
    upper.set_yscale("log")
    upper.set_ylabel(f"relative difference of the loss\nfrom {report['first']}")
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    lower.plot(list(report["grad_norm"]), list(report["grad_norm"].values()), color=PAPER.series[-1])
    lower.set_yscale("log")
    lower.set_ylabel("gradient norm")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        style(axes, PAPER)
    path.write_bytes(as_png(figure))


if __name__ == "__main__":
    main()
