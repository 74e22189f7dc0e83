"""Plan each published recipe on the same GPUs: `python bench/plan_recipes.py --gpus 8 --gpu H100`.

Prints a row for each phase, with the first setting of `multihop plan`, whose other options may be given too.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = (
    *("recipe", "phase", "sequence", "ZeRO", "checkpointing", "micro-batch", "memory, GB", "step, ms"),
    *("limited by", "tokens/s", "MFU", "hours"),
)


def main() -> None:
    """Print the table."""
    print("|", " | ".join(COLUMNS), "|")
    print("|---" * len(COLUMNS) + "|")
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        command = [sys.executable, "-m", "multihop.cluster.cli.main", "plan", str(path), "--json", *sys.argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {path.stem} |", done.stderr.strip().splitlines()[-1], "|" * (len(COLUMNS) - 1))
            continue
        for plan in json.loads(done.stdout)["plans"]:
            if not plan["micro_batch_size"]:
                print(f"| {path.stem} | {plan['phase']} | does not fit", "|" * (len(COLUMNS) - 2))
                continue
            print(
                f"| {path.stem} | {plan['phase']} | {plan['seq_len']:,} | {plan['zero_stage']} "
                f"| {plan['activation_checkpointing']} | {plan['micro_batch_size']} "
                f"| {plan['peak_bytes'] / 1e9:.1f} | {plan['step_s'] * 1000:,.0f} | {plan['limited_by']} "
                f"| {plan['tokens_per_s']:,.0f} | {plan['mfu']:.0%} | {plan['hours']:,.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
