"""One number for each task of a run, to compare runs by."""

from collections.abc import Iterator
from statistics import median

from eval.asked import Results
from eval.statistics.choose import choose


def median_scores(results: Results) -> Iterator[tuple[str, int, float]]:
    """(name, step of the checkpoint, median over the seeds at the chosen settings) of each task's test scores.

    The name is "TASK METRIC" of the run's checkpoints. Other starts have names of their own, so that no score stands
    in the history of another: "TASK METRIC random", "TASK METRIC parent" and, of a Hugging Face model,
    "TASK METRIC eval.checkpoint". Their step is 0.
    """
    for start, choice in choose((*results.earlier, *results.rows)).items():
        if choice.chosen.rows:
            name = f"{start.task} {choice.chosen.rows[0]['metric']}"
            own = start.init == "pretrained"
            if own and start.checkpoint_step is not None:
                yield name, start.checkpoint_step, median(choice.chosen.values)
            else:
                yield f"{name} {'eval.checkpoint' if own else start.init}", 0, median(choice.chosen.values)
