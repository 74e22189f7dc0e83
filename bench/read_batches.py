"""Measure how many tokens a second a data worker delivers to its rank, for each objective and unit of masking:

    python bench/read_batches.py runs/NAME/data [runs/OTHER/data ...]

The folders have prepared data; each objective takes the first one whose special tokens and documents or pairs suit it.
A rank's batches are made by one data worker, as in training, from files that are in the page cache. The rate is that of
the worker's CPU time, which other programs on the machine do not change much; that of the clock is printed beside it,
and the CPU time in which the rank's own process receives the batches. `_READ_TOKENS_PER_S` of
pretrain/objectives/read_rates.py has the rates by which `multihop plan` tells whether reading limits a step.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from multihop.common.errors import UserError
from multihop.common.machine import cpu_model
from multihop.data_prep.config import DataConfig
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.data.loader import prefetch_batches
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import OBJECTIVES
from multihop.pretrain.objectives.ctc import check_targets

LENGTHS = (128, 512)
TOKENS = 65_536
"""Tokens of a batch, at most."""
MEASURED: list[dict[str, Any]] = [
    *({"name": name} for name in OBJECTIVES),
    {"name": "mlm", "masking": "words"},
    {"name": "mlm", "masking": "spans"},
    {"name": "mlm+sop", "masking": "ngrams"},
]
COLUMNS = ("objective", "tokens a sample", "million tokens/s of CPU time", "from", "to", "of the clock", "receiving, %")


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=60, help="batches of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench/results/read_batches.json"))
    options = parser.parse_args()
    rows = []
    print("|", " | ".join(COLUMNS), "|")
    print("|---" * len(COLUMNS) + "|")
    for objective in MEASURED:
        folder = next((each for each in options.data if suits(each, objective["name"])), None)
        if folder is None:
            print(f"{' '.join(objective.values())}: not measured, none of the folders has data for it", file=sys.stderr)
            continue
        for seq_len in LENGTHS:
            with tempfile.TemporaryDirectory(prefix="read-batches-") as index:
                found = [
                    measure(objective, seq_len, folder, Path(index), options.steps) for _ in range(options.repeats)
                ]
            rows.append({"objective": objective, "seq_len": seq_len, "data": str(folder), "measured": found})
            show(rows[-1])
    report = {
        "date": date.today().isoformat(),
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(report["machine"])


def suits(data: Path, objective: str) -> bool:
    """Whether prepared data has what an objective needs."""
    manifest, needs = read_data_manifest(data), OBJECTIVES[objective]
    if manifest.pairs != needs.reads_pairs or not needs.special_tokens <= manifest.tokenizer.special_ids.keys():
        return False
    if needs.target_fits_source:
        try:
            check_targets(open_dataset(data).train, "training", DataConfig.model_fields["max_bad_fraction"].default)
        except UserError:
            return False
    return True


def measure(objective: dict[str, Any], seq_len: int, data: Path, index: Path, steps: int) -> dict[str, float]:
    """Make batches in a data worker; returns their tokens, and seconds of the worker, the clock and this process."""
    family = next(name for name, family in FAMILIES.items() if objective["name"] in family.objectives)
    recipe: dict[str, Any] = {
        "model": {"family": family, "layers": 1, "hidden": 8, "max_positions": seq_len},
        "objective": objective,
        "phases": [{"seq_len": seq_len, "global_batch_size": TOKENS // seq_len, "steps": steps + 1}],
    }
    if "heads" in FAMILIES[family].config.model_fields:
        recipe["model"]["heads"] = 1
    config = TrainingConfig.model_validate(recipe)
    build_indexes(index, open_dataset(data), config)
    builder = BatchBuilder.open(config, data, index, 0, 1, [TOKENS // seq_len])
    builder.step(0)  # opens the shards
    began, own, others = time.perf_counter(), time.process_time(), children_s()
    tokens = sum(batch.tokens for batch in prefetch_batches(builder, range(1, steps + 1), 1))
    return {
        "tokens": tokens,
        "samples": steps * (TOKENS // seq_len),
        "seconds": time.perf_counter() - began,
        "receiver_s": time.process_time() - own,
        "worker_s": children_s() - others,
    }


def children_s() -> float:
    """CPU seconds of the child processes that have ended."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    measured = row["measured"]
    rates = [each["tokens"] / each["worker_s"] / 1e6 for each in measured]
    of_clock = statistics.median(each["tokens"] / each["seconds"] / 1e6 for each in measured)
    receiving = statistics.median(each["receiver_s"] / each["worker_s"] for each in measured)
    length = measured[0]["tokens"] / measured[0]["samples"]
    spread = f"{statistics.median(rates):.2f} | {min(rates):.2f} | {max(rates):.2f}"
    name = " ".join(row["objective"].values())
    print(f"| {name} | {length:.0f} | {spread} | {of_clock:.2f} | {100 * receiving:.0f} |", flush=True)


if __name__ == "__main__":
    main()
