"""The command `inspect batch`: the samples of a training step as JSON for programs, or as text for people."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multihop.cluster.cli.options import AsJson, Overrides, RecipePath, Runs
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from multihop.cluster.runs.inspect_step import InspectedStep

inspect_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_WORD_START = "▁"


@inspect_app.command("batch")
def inspect_batch(
    recipe: RecipePath,
    step: Annotated[int, typer.Option(help="0-based step.")],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    world_size: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Number of ranks: show each sample's rank.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Show only this rank's samples; needs --world-size.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the samples of a training step, decoded, and their documents."""
    from multihop.cluster.runs.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    from multihop.cluster.runs.inspect_step import deviations, inspect_step

    inspected = inspect_step(resolved, runs, step, world_size, rank)
    if others := deviations(resolved, runs):
        print(
            f"multihop: warning: the existing run {runs / resolved.name} has different batches: its recipe differs in "
            f"{', '.join(others)}",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(inspected.as_json(), ensure_ascii=False, indent=1))
    else:
        show_step(inspected)


def show_step(step: "InspectedStep") -> None:
    """Print each sample of a step; `{original → input}` marks predicted tokens."""
    from rich.console import Console
    from rich.text import Text

    from multihop.cluster.console import plain

    console = Console(highlight=False)
    skipped = "  skipped by the recipe" if step.skipped else ""
    console.print(f"step {step.step}  phase {step.phase}  {len(step.samples)} samples{skipped}", style="bold")
    for sample in step.samples:
        console.print()
        fields = {key: value for key, value in sample.fields.items() if key != "documents"}
        line = "  ".join(f"{key} {value}" for key, value in fields.items())
        console.print(plain(line), style="cyan", soft_wrap=True)
        text = Text()
        tokens, inputs = [safe_text(token) for token in sample.tokens], [safe_text(token) for token in sample.inputs]
        for token, seen, predicted in zip(tokens, inputs, sample.predicted, strict=True):
            if token.startswith(" ") and len(text) and not text.plain.endswith(" "):
                text.append(" ")
            if predicted:
                text.append(f"{{{token.strip() or _WORD_START} → {seen.strip() or _WORD_START}}}", style="yellow")
            else:
                text.append(token.lstrip(" "))
        text.rstrip()
        console.print(text, soft_wrap=not console.is_terminal)
