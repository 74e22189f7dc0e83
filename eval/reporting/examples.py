"""The examples of a run as text."""

from typing import Any


def examples_facts(made: dict[str, Any] | None) -> dict[str, Any]:
    """What the report's templates need: the rows (text, before, after), and a sentence about them.

    Args:
        made: what `multihop.eval.inference.examples.make_examples` returned; None: nothing.
    """
    if made is None:
        return {"examples": [], "examples_note": ""}
    is_filled = any(isinstance(each["after"], list) for each in made["examples"])
    answers = (
        "The likeliest tokens for each mask token, with their probabilities."
        if is_filled
        else "Continuations, sampled among the likeliest tokens with a fixed seed."
    )
    step = made["checkpoint_step"]
    return {
        "examples": [
            (each["text"], answer_text(each["before"]), answer_text(each["after"])) for each in made["examples"]
        ],
        "examples_note": answers if step is None else f"{answers} After: the checkpoint of step {step:,}.",
    }


def answer_text(answer: str | list[list[dict[str, Any]]]) -> str:
    """A continuation, or the tokens for each mask token: "sea 31 %, river 12 %; blue 8 %, deep 7 %"."""
    if isinstance(answer, str):
        return f"… {answer.strip()}"
    return "; ".join(", ".join(f"{each['token']} {each['probability']:.0%}" for each in mask) for mask in answer)
