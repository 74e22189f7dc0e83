"""One score for each task of a run, by which runs are compared."""

from collections.abc import Iterator
from statistics import median

from multihop.eval.evaluation_plan import Results
from multihop.eval.statistics.choose import choose


def median_scores(results: Results) -> Iterator[tuple[str, int, float]]:
    """(name, step of the checkpoint, median over the seeds at the chosen settings) of each task's test scores.

    The name is "TASK METRIC" for the run's checkpoints. Other starts have their own names, so that their scores do not
    appear in the history of the checkpoints: "TASK METRIC random", "TASK METRIC parent" and, for a Hugging Face
    model, "TASK METRIC eval.checkpoint". Their step is 0.
    """
    for start, choice in choose((*results.earlier, *results.rows)).items():
        if choice.chosen.rows:
            name = f"{start.task} {choice.chosen.rows[0]['metric']}"
            own = start.init == "pretrained"
            if own and start.checkpoint_step is not None:
                yield name, start.checkpoint_step, median(choice.chosen.values)
            else:
                yield f"{name} {'eval.checkpoint' if own else start.init}", 0, median(choice.chosen.values)
