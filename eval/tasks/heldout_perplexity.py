"""heldout-perplexity: a causal model's perplexity on the run's own held-out documents, without fine-tuning."""

from multihop.eval.tasks.task import Task


def find(data_dir: str | None) -> None:
    """Nothing to find: the documents are in the run's prepared data."""


def read(data_dir: str | None) -> Task:
    """The task. Its examples are the held-out documents of a trial's data."""
    return Task(
        name="heldout-perplexity",
        kind="zero-shot",
        metric="perplexity",
        higher_is_better=False,
        source="The run's own held-out documents.",
    )
