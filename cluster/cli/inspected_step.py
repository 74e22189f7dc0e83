"""What `multihop inspect batch` shows of a step: as JSON for programs, as text for people."""

from dataclasses import dataclass
from typing import Any

from multihop.cluster.console import plain
from multihop.common.redaction import shown

_WORD_START = "▁"


@dataclass(frozen=True)
class InspectedSample:
    """One sample of a step."""

    facts: dict[str, Any]
    """sample, epoch, document, source and documents; where they apply, rank, next_document, next_source,
    is_random_next and is_swapped."""
    tokens: list[str]
    """The original tokens, special tokens included."""
    inputs: list[str]
    """The model's input: differs from `tokens` at masked positions."""
    predicted: list[bool]
    """Which positions a masked language model predicts; all False for other objectives."""

    def as_json(self) -> dict[str, Any]:
        masked = {"masked_text": _joined(self.inputs)} if any(self.predicted) else {}
        return {**self.facts, "text": _joined(self.tokens), **masked}


@dataclass(frozen=True)
class InspectedStep:
    """The samples of one step."""

    step: int
    phase: int
    skipped: bool
    samples: list[InspectedSample]

    def as_json(self) -> dict[str, Any]:
        head = {"step": self.step, "phase": self.phase, "skipped": self.skipped}
        return {**head, "samples": [sample.as_json() for sample in self.samples]}


def show_step(step: InspectedStep) -> None:
    """Print each sample of a step; `{original → input}` marks predicted tokens."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    skipped = "  skipped by the recipe" if step.skipped else ""
    console.print(f"step {step.step}  phase {step.phase}  {len(step.samples)} samples{skipped}", style="bold")
    for sample in step.samples:
        console.print()
        facts = {key: value for key, value in sample.facts.items() if key != "documents"}
        line = "  ".join(f"{key} {value}" for key, value in facts.items())
        console.print(plain(line), style="cyan", soft_wrap=True)
        text = Text()
        tokens, inputs = [shown(token) for token in sample.tokens], [shown(token) for token in sample.inputs]
        for token, seen, predicted in zip(tokens, inputs, sample.predicted, strict=True):
            if token.startswith(" ") and len(text) and not text.plain.endswith(" "):
                text.append(" ")
            if predicted:
                text.append(f"{{{token.strip() or _WORD_START} → {seen.strip() or _WORD_START}}}", style="yellow")
            else:
                text.append(token.lstrip(" "))
        text.rstrip()
        console.print(text, soft_wrap=not console.is_terminal)


def _joined(tokens: list[str]) -> str:
    return " ".join("".join(tokens).split())
