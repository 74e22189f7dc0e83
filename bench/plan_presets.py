"""Plan each preset at several lengths on the same GPUs: `python bench/plan_presets.py --gpus 8 --gpu H100`.

Prints a row for each preset, and for each length that its positions allow the largest micro-batch that fits, its memory
and the MFU, in bf16 under ZeRO stage 1 without activation checkpointing, with half a million tokens a rank and step.
The other options of `multihop plan` may be given too; of several settings the cheapest that fits is printed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from multihop.pretrain.models.families import FAMILIES, PRESETS

LENGTHS = (128, 512, 1024, 8192)
RANKS, TOKENS = 8, 2**19
VOCABULARY = 32_000


def recipe_of(preset: str, folder: Path) -> dict[str, Any]:
    """A recipe with a phase for each length."""
    (folder / "texts.jsonl").write_text('{"text": "not read for a plan", "a": "", "b": ""}\n')
    longest, family = PRESETS[preset]["max_positions"], FAMILIES[PRESETS[preset]["family"]]
    pairs = family.translates or family.uses_ctc
    special_tokens = "t5" if pairs else "gpt2" if family.causal else "bert"
    text = {"fields": {"source": "a", "target": "b"}} if pairs else {}
    return {
        "name": preset,
        "data": {"sources": [{"path": str(folder / "texts.jsonl"), **text}]},
        "tokenizer": {"vocab_size": VOCABULARY, "special_tokens": special_tokens},
        # Words are read by their characters only with imported weights.
        "model": {"preset": preset} | ({"characters": None} if "characters" in PRESETS[preset] else {}),
        "phases": [
            {"seq_len": length, "global_batch_size": RANKS * TOKENS // length, "steps": 1000}
            for length in LENGTHS
            if length <= longest
        ],
        "engine": {"precision": "bf16", "zero_stage": 1, "micro_batch_size": "auto"},
    }


def main() -> None:
    """Print the table."""
    print("| preset | parameters, millions |", " | ".join(f"{length:,} tokens" for length in LENGTHS), "|")
    print("|---" * (2 + len(LENGTHS)) + "|")
    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.yaml"
            path.write_text(yaml.safe_dump(recipe_of(preset, Path(folder))))
            command = [sys.executable, "-m", "multihop.cluster.cli.main", "plan", str(path), "--json", *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {preset} |", done.stderr.strip().splitlines()[-1], "|" * (1 + len(LENGTHS)))
            continue
        plans = {plan["seq_len"]: plan for plan in reversed(json.loads(done.stdout)["plans"])}  # the cheapest first
        parameters = next(iter(plans.values()))["parameters"]
        cells = [_cell(plans.get(length)) for length in LENGTHS]
        print(f"| {preset} | {parameters / 1e6:,.1f} |", " | ".join(cells), "|", flush=True)


def _cell(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    memory = f"{plan['peak_bytes'] / 1e9:.1f} GB"
    if not plan["micro_batch_size"]:
        return f"does not fit: {memory}"
    return f"{plan['micro_batch_size']:,}: {memory}, {plan['mfu']:.0%}"


if __name__ == "__main__":
    main()
