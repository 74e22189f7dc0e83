"""The pictures of reports, in one style (`multihop.eval.report.figures`): colours that colour-blind readers tell apart,
and lines that differ in style too.

Pictures of one task are returned as SVG for the page. The others are figures, which the caller draws for a PNG, for a
page, or for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from multihop.eval.report.figures import PAGE, PAPER, Colours, as_svg, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Lines = Sequence[tuple[str, Mapping[int, float] | Mapping[float, float]]]
"""Labels with values by what is on the horizontal axis."""
Panel = tuple[str, Lines]
"""Title of the vertical axis, and what is drawn."""

_FIRST, _SECOND, _THIRD, *_ = PAGE.series
_STARTS = {"pretrained": (_FIRST, "-"), "parent": (_THIRD, ":"), "random weights": (_SECOND, "--")}
_MAX_POINTS = 150
_MAX_MARKED_POINTS = 12
_LINE_STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "^")
_PANELS_PER_ROW = 3


@dataclass(frozen=True)
class Curve:
    """One loss by step, in nats."""

    name: str
    train: dict[int, float]
    heldout: dict[int, float]
    references: dict[str, float]
    """Losses that are drawn as horizontal lines, by their label."""


@dataclass(frozen=True)
class Scores:
    """A task's scores of several runs over the seeds, from both starts; empty for a run without results."""

    title: str
    pretrained: Sequence[Sequence[float]]
    random: Sequence[Sequence[float]]


def draw_losses(curves: Sequence[Curve]) -> "Figure":
    """A figure for a PNG with a panel for each curve, the first one larger."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2 if len(curves) == 1 else 6.4), layout="constrained")
    panels = figure.subplots(
        len(curves), sharex=True, squeeze=False, gridspec_kw={"height_ratios": [2, *[1] * (len(curves) - 1)]}
    )
    for (axes,), curve in zip(panels, curves, strict=True):
        _draw_curve(axes, curve)
    # Above the lines: in some runs, any position within them is on one of the references.
    panels[0, 0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    panels[-1, 0].set_xlabel("step", color=PAPER.ink)
    return figure


def learning_curves(name: str, title: str, starts: Mapping[str, Sequence[Points]]) -> str:
    """One value by step of each trial.

    Args:
        name: of the picture, unique on its page.
        title: of the vertical axis.
        starts: "pretrained", "parent" and "random weights" -> the (step, value) points of each of its trials.
    """
    figure, axes = new_figure(title, "step of fine-tuning")
    for start, trials in starts.items():
        colour, line = _STARTS[start]
        for number, points in enumerate(trials):
            steps, values = zip(*_thin(points), strict=True)
            # A short curve may be one point, which a line does not show.
            marker = "o" if len(steps) <= _MAX_MARKED_POINTS else ""
            label = "_" * (number > 0) + start
            axes.plot(
                steps, values, color=colour, linestyle=line, linewidth=1.3, marker=marker, markersize=3, label=label
            )
    axes.legend(frameon=False, labelcolor=PAGE.ink, fontsize=8)
    return as_svg(figure, name, title)


def by_pretraining_step(name: str, title: str, points: Mapping[int, Sequence[float]]) -> str:
    """Scores by the pretraining step of the checkpoint: the median as a line, the seeds from minimum to maximum."""
    figure, axes = new_figure(title, "step of pretraining")
    steps = list(points)
    axes.fill_between(
        steps, [min(v) for v in points.values()], [max(v) for v in points.values()], color=_FIRST, alpha=0.2, lw=0
    )
    axes.plot(steps, [median(v) for v in points.values()], color=_FIRST, marker="o", markersize=4, linewidth=1.5)
    return as_svg(figure, name, title)


def side_by_side(name: str, title: str, panels: Mapping[str, Points]) -> str:
    """A panel for each value, by the step of pretraining; `panels`: the (step, value) points by the value's name."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(2.2 * len(panels), 1.9), layout="constrained")
    for axes, (label, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        style(axes, PAGE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        axes.set_xlabel("step of pretraining", color=PAGE.ink, fontsize=9)
        axes.set_title(label, color=PAGE.ink, fontsize=9)
        steps, values = zip(*_thin(points), strict=True)
        marker = "o" * (len(steps) <= _MAX_MARKED_POINTS)
        axes.plot(steps, values, color=_SECOND, marker=marker, markersize=3, linewidth=1.4)
        axes.margins(x=0.04, y=0.1)
    return as_svg(figure, name, title)


def draw_lines(
    colours: Colours, panels: Sequence[Panel], below: str, log: bool = False, highest: float = inf
) -> "Figure":
    """A panel above the other, with a line for each label.

    Args:
        panels: lines with the same index in several panels have one colour; a line without points is not drawn.
        below: title of the horizontal axis.
        log: the horizontal axis is logarithmic, with a tick at each value.
        highest: what is above it is cut off.
    """
    from matplotlib.ticker import EngFormatter

    figure, rows = _figure(len(panels), 1, (8, 3.9 * len(panels)))
    for axes, (title, lines) in zip(rows, panels, strict=True):
        for number, (label, points) in enumerate(lines):
            if not points:
                continue
            colour, dashes, marker = _look(colours, number)
            axes.plot(
                list(points), list(points.values()), color=colour, linestyle=dashes, marker=marker, markersize=4,
                linewidth=1.4, label=_label(label),
            )  # fmt: skip
        if log:
            _log_axis(axes, sorted({x for _, points in lines for x in points}))
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        lowest = min((y for _, points in lines for y in points.values()), default=0.0)
        if any(y > highest for _, points in lines for y in points.values()):
            axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)
        _finish(axes, colours, below, title)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=colours.ink, fontsize=8)
    return figure


def draw_scores(colours: Colours, names: Sequence[str], tasks: Sequence[Scores]) -> "Figure":
    """A panel for each task: medians with minimum and maximum over the seeds, random weights hollow."""
    columns = min(_PANELS_PER_ROW, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, panels = _figure(rows, columns, (3.1 * columns + 1.2, rows * (0.34 * len(names) + 1.1)))
    for axes, task in zip(panels, tasks, strict=False):
        for row in range(len(names)):
            colour, _, marker = _look(colours, row)
            for values, offset, fill in ((task.pretrained[row], -0.12, colour), (task.random[row], 0.18, "none")):
                if values:
                    y = row + offset
                    axes.plot([min(values), max(values)], [y, y], color=colour, linewidth=1.4)
                    axes.plot(median(values), y, marker=marker, color=colour, markerfacecolor=fill, markersize=5)
        axes.set_yticks(range(len(names)), [_label(name) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        _finish(axes, colours, task.title, "")
        axes.grid(axis="x", color=colours.grid, linewidth=0.8)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    return figure


def draw_classes(
    colours: Colours, panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]]
) -> "Figure":
    """A panel below the other: its title, the names of classes from left to right, and of each label its values."""
    figure, rows = _figure(len(panels), 1, (8, 3.9 * len(panels)))
    for axes, (title, classes, lines) in zip(rows, panels, strict=True):
        for number, (label, values) in enumerate(lines.items()):
            colour, dashes, marker = _look(colours, number)
            axes.plot(
                range(len(classes)), values, color=colour, linestyle=dashes, marker=marker, markersize=4,
                linewidth=1.4, label=_label(label),
            )  # fmt: skip
        axes.set_xticks(range(len(classes)), classes)
        axes.set_ylim(bottom=0.0)
        _finish(axes, colours, "words of the source (sentences)", title)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=colours.ink, fontsize=8)
    return figure


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=columns > 1).ravel())


def _look(colours: Colours, number: int) -> tuple[str, str, str]:
    """Another colour for each line; once all are used, another style, too."""
    round_, index = divmod(number, len(colours.series))
    return colours.series[index], _LINE_STYLES[round_ % len(_LINE_STYLES)], _MARKERS[round_ % len(_MARKERS)]


def _label(text: str) -> str:
    """`$` begins a formula, and a label with a first `_` is not in the legend."""
    return text.replace("$", r"\$").replace("_", "\u200b_", 1) if text.startswith("_") else text.replace("$", r"\$")


def _log_axis(axes: "Axes", values: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.minorticks_off()


def _finish(axes: "Axes", colours: Colours, below: str, title: str) -> None:
    style(axes, colours)
    axes.set_xlabel(_label(below), color=colours.ink, fontsize=9)
    axes.set_ylabel(_label(title), color=colours.ink, fontsize=9)


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    train, heldout, *_ = PAPER.series
    style(axes, PAPER)
    axes.plot(list(curve.train), list(curve.train.values()), color=train, linewidth=1.4, label="training text")
    points = list(curve.heldout), list(curve.heldout.values())
    axes.plot(*points, color=heldout, linewidth=1.8, marker="o", markersize=4.5, label="held-out text")
    for (name, value), dashes in zip(curve.references.items(), ((6, 3), (1.5, 2)), strict=False):
        axes.axhline(value, color=PAPER.ink, linewidth=1.2, dashes=dashes)
        axes.annotate(
            f"{name}: {value:.2f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=PAPER.ink,
            fontsize=9,
        )
    axes.margins(x=0.02, y=0.09)
    axes.set_ylabel(f"{curve.name} (nats)", color=PAPER.ink)


def _thin(points: Points) -> Points:
    """At most `_MAX_POINTS` means of neighbours: a page with every step of every trial would have megabytes."""
    size = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
