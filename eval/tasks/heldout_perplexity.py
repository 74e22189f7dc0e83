"""heldout-perplexity: how well a causal model predicts the run's own held-out documents, without any training."""

from eval.tasks.task import Task


def find(data_dir: str | None) -> None:
    """Nothing to find: the documents are in the run's prepared data."""


def read(data_dir: str | None) -> Task:
    """The task; its examples are the held-out documents of whichever data a trial names."""
    return Task(
        name="heldout-perplexity",
        kind="zero-shot",
        metric="perplexity",
        higher_is_better=False,
        source="The run's own held-out documents.",
    )
