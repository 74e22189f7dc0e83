"""The summary of bench/gpu.sh: `gpu_summary.py FOLDER` reads the JSON of its stages and writes FOLDER/summary.md."""

import importlib.metadata
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Peak FLOP/s in dense bf16, from NVIDIA's datasheets (SXM)."""


def head_of(folder: Path) -> str:
    """Return date, device, driver, versions and commit."""
    gpu = folder / "gpu.txt"
    device = gpu.read_text().strip() if gpu.exists() else "no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    commit = git.stdout.strip() or "unknown commit"
    return f"{datetime.now(UTC):%Y-%m-%d}, {device}, {versions}, CUDA {torch.version.cuda}, commit {commit}"


def version(name: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def row_of(stage: str, result: dict[str, Any], rate: float, peak: float | None) -> str:
    """Return a line of the table of steps."""
    reached = result["share_of_matmul_rate"] * rate
    mfu = f"{reached / peak:.0%}" if peak else ""
    memory = result["peak_bytes"]["ours"] / 1e9
    beside = "; ".join(
        f"{name} {result[name]['speed']:.2f} times, memory {result[name]['memory']:.2f}"
        for name in result["peak_bytes"]
        if name != "ours"
    )
    cells = (
        stage,
        result["shape"],
        f"{result['tokens_per_s']:,.0f}",
        mfu,
        f"{reached / rate:.0%}",
        f"{memory:.1f}",
        beside,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    folder = Path(sys.argv[1])
    head = head_of(folder)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in head), None)
    lines = [
        head,
        "",
        "| stage | shape | tokens/s | MFU | of measured matmul | GB | ours against |",
        "|---|" + "---|" * 6,
    ]
    stages = [line.split("\t") for line in (folder / "stages.tsv").read_text().splitlines()]
    for name, _, _ in stages:
        path = folder / f"{name}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        lines += [
            row_of(name, each, report["matmul_flops_per_s"], peak)
            for each in report.get("results", ())
            if "shape" in each
        ]
    lines += ["", "| stage | ended with | seconds |", "|---|---|---|"]
    words = {"0": "0", "124": "124, its limit of time", "137": "137, killed"}
    lines += [f"| {name} | {words.get(status, status)} | {seconds} |" for name, status, seconds in stages]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
