"""The pictures of several runs. Each is drawn with given colours, for a PNG and for a page that may be dark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from multihop.eval.reporting.figures import Colours, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[tuple[str, Mapping[int, float] | Mapping[float, float]]]
"""Labels with values by what is on the horizontal axis."""
Panel = tuple[str, Lines]
"""Title of the vertical axis, and what is drawn."""

_STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "^")
_IN_A_ROW = 3


@dataclass(frozen=True)
class Scores:
    """A task's scores of several runs over the seeds, from both starts; empty for a run without results."""

    title: str
    pretrained: Sequence[Sequence[float]]
    random: Sequence[Sequence[float]]


def draw_lines(
    colours: Colours, panels: Sequence[Panel], below: str, log: bool = False, highest: float = inf
) -> "Figure":
    """A panel above the other, with a line for each label.

    Args:
        panels: the lines at one place of several panels have one colour; a line without points takes no room.
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
    columns = min(_IN_A_ROW, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, panels = _figure(rows, columns, (3.1 * columns + 1.2, rows * (0.34 * len(names) + 1.1)))
    for axes, task in zip(panels, tasks, strict=False):
        for place in range(len(names)):
            colour, _, marker = _look(colours, place)
            for values, height, fill in ((task.pretrained[place], -0.12, colour), (task.random[place], 0.18, "none")):
                if values:
                    at = place + height
                    axes.plot([min(values), max(values)], [at, at], color=colour, linewidth=1.4)
                    axes.plot(median(values), at, marker=marker, color=colour, markerfacecolor=fill, markersize=5)
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
    round_, place = divmod(number, len(colours.series))
    return colours.series[place], _STYLES[round_ % len(_STYLES)], _MARKERS[round_ % len(_MARKERS)]


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
