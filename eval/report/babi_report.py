"""The report over bAbI's tasks: errors beside the published ones, and what the hops attend to."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from multihop.common.files import write_atomically
from multihop.eval.memory_network.babi import PUBLISHED_JOINT, PUBLISHED_SINGLE_TASK
from multihop.eval.memory_network.training import JOINT, TrainingSettings
from multihop.eval.report.plot_style import TICK_SIZE, Colors, literal, new_figure
from multihop.eval.report.plots import Picture
from multihop.eval.report.render import render
from multihop.eval.tasks.babi import TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAILED = 0.05
"""A task has failed if its test error is above this (table 1)."""
_ROW_INCHES = 0.22
_DARKEST = 0.6
"""Opacity of a weight of 1, on which its number is still legible."""


def write_babi_report(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write report.md, report.html and the pictures of the rows of `run_babi`."""
    settings, joint = rows[0]["settings"], rows[0]["joint"]
    published = PUBLISHED_JOINT if joint else PUBLISHED_SINGLE_TASK
    # Other sizes have other errors, and so has the best of fewer networks; a joint network of some tasks is another one
    # than that of all.
    default = JOINT if joint else TrainingSettings()
    is_published = all(settings[name] == getattr(default, name) for name in ("hops", "tying", "width", "restarts"))
    is_published = is_published and (not joint or len(rows) == len(TASKS))
    lines = [
        [
            row["task"],
            row["name"],
            _percent([row["error"]]),
            f"{published[row['task']]:.1f}" if is_published else "",
            _percent([row["training_error"]]),
            _percent([row["validation_error"]]),
            ", ".join(f"{100 * each:.1f}" for each in sorted(row["errors_of_restarts"])),
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    if len(rows) == len(TASKS):
        of_restarts = [mean(errors) for errors in zip(*(row["errors_of_restarts"] for row in rows), strict=True)]
        lines += [
            [
                "mean",
                "",
                _percent([row["error"] for row in rows]),
                f"{mean(published.values()):.1f}" if is_published else "",
                _percent([row["training_error"] for row in rows]),
                _percent([row["validation_error"] for row in rows]),
                ", ".join(f"{100 * each:.1f}" for each in sorted(of_restarts)),
                f"{mean(row['seconds'] for row in rows):.0f}",
            ],
            [
                "failed",
                f"test errors above {_FAILED:.0%}",
                sum(row["error"] > _FAILED for row in rows),
                sum(error > 100 * _FAILED for error in published.values()) if is_published else "",
                *[""] * 4,
            ],
        ]
    pictures = [_picture(row) for row in rows]
    context = {
        "hops": settings["hops"],
        "width": settings["width"],
        "tying": settings["tying"],
        "joint": joint,
        "restarts": settings["restarts"],
        "seed": rows[0]["seed"],
        "validation": f"{settings['validation']:.0%}",
        "rows": lines,
        "unused": [
            f"{row['stories_without_question']} of task {row['task']}"
            for row in rows
            if row["stories_without_question"]
        ],
        "pictures": [picture.context() for picture in pictures],
    }
    markdown, page = render("babi.md.jinja", "bAbI with memory networks", context)
    for picture in pictures:
        write_atomically(out / picture.file, picture.png())
    write_atomically(out / "report.md", markdown)
    write_atomically(out / "report.html", page)


def _percent(errors: Sequence[float | None]) -> str:
    """Return the mean of the errors that are known, in percent."""
    known = [error for error in errors if error is not None]
    return f"{100 * mean(known):.1f}" if known else ""


def _picture(row: dict[str, Any]) -> Picture:
    example = row["example"]
    caption = f"Task {row['task']}: {example['question']} {example['answer']}"
    if example["predicted"] != example["answer"]:
        caption += f" (predicted: {example['predicted']})"
    return Picture(
        f"attention-{row['task']}.png",
        f"Attention of each hop to the statements before the question: {caption}",
        caption,
        lambda colors: draw_attention(example, colors),
    )


def draw_attention(example: dict[str, Any], colors: Colors) -> "Figure":
    """Draw the attention of each hop to each statement, as in figure 2 of the paper: statements from top to bottom,
    hops from left to right."""
    weights = example["attention"]
    figure, (axes,) = new_figure(width=4.5 + 0.5 * len(weights), height=0.5 + _ROW_INCHES * len(weights[0]))
    axes.patch.set_alpha(0)
    for hop, column in enumerate(weights):
        for row, weight in enumerate(column):
            axes.barh(row, 0.9, left=hop, height=0.9, color=colors.series[0], alpha=_DARKEST * min(1.0, weight))
            axes.text(hop + 0.45, row, f"{weight:.2f}", ha="center", va="center", fontsize=7, color=colors.ink)
    axes.set(xlim=(0, len(weights)), ylim=(len(weights[0]) - 0.5, -0.5))
    axes.set_xticks([hop + 0.45 for hop in range(len(weights))], [f"hop {hop}" for hop in range(1, len(weights) + 1)])
    axes.set_yticks(range(len(weights[0])), [literal(text) for text in example["statements"]])
    axes.tick_params(colors=colors.ink, labelsize=TICK_SIZE, length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return figure
