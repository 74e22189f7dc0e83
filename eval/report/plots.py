"""The pictures of reports, drawn in the style of `multihop.eval.report.plot_style`.

A function that takes colors returns a figure, which the caller encodes as a PNG or for a page. Pictures that only the
page has are returned as SVG.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import median
from typing import TYPE_CHECKING, Any

from multihop.eval.report.plot_style import (
    LABEL_SIZE,
    LINE_WIDTH,
    MARKER_SIZE,
    PAGE,
    PAPER,
    TICK_SIZE,
    WIDTH,
    Colors,
    as_png,
    as_svg,
    legend,
    literal,
    look_of,
    new_figure,
    style,
    whole_steps,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Lines = Sequence[tuple[str, Mapping[int, float] | Mapping[float, float]]]
"""Lines of a panel: the label of each, and its values by position on the horizontal axis."""
Panel = tuple[str, Lines]
"""Title of the vertical axis, and the lines."""

_INITS = {"pretrained": (0, "-"), "parent": (2, ":"), "random weights": (1, "--")}
"""Number of the color, and dashes, of trials by their initial weights."""
MAX_POINTS = 150
"""Maximum number of points of a line by step: a page with every step of every trial would take megabytes."""
_MAX_MARKED_POINTS = 12
_PANELS_PER_ROW = 3
_NUMBER_SHARE = 0.09
"""The share of an axis that a tick's number takes."""


@dataclass(frozen=True)
class Picture:
    """A picture of a report: a PNG file beside the Markdown report, an SVG within the page."""

    file: str
    alt: str
    """Description for readers who do not see the picture."""
    caption: str
    draw: Callable[[Colors], "Figure"]

    def png(self) -> bytes:
        """Return the picture on white."""
        return as_png(self.draw(PAPER))

    def context(self) -> dict[str, Any]:
        """Return the values that templates use."""
        svg = as_svg(self.draw(PAGE), self.file, self.alt)
        return {"file": self.file, "alt": self.alt, "caption": self.caption, "svg": svg}


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
    """A task's scores of several runs over the seeds, from both initializations; empty for a run without results."""

    title: str
    pretrained: Sequence[Sequence[float]]
    random: Sequence[Sequence[float]]


def draw_losses(colors: Colors, curves: Sequence[Curve]) -> "Figure":
    """Draw a panel for each curve, the first one larger."""
    heights = [2.0, *[1.0] * (len(curves) - 1)]
    figure, panels = new_figure(len(curves), height=1.9 + 1.3 * sum(heights), heights=heights, sharex=True)
    for axes, curve in zip(panels, curves, strict=True):
        _draw_curve(axes, colors, curve)
    legend(panels[0], colors, above=True, columns=2)
    style(panels[-1], colors, "step")
    return figure


def draw_by_step(colors: Colors, panels: Mapping[str, Points]) -> "Figure":
    """Draw panels below each other, each with one value by step, from its lowest to its highest value.

    Args:
        panels: (step, value) points by the title of the vertical axis.
    """
    from matplotlib.ticker import StrMethodFormatter

    figure, rows = new_figure(len(panels), height=0.4 + 1.5 * len(panels), sharex=True)
    for number, (axes, (title, points)) in enumerate(zip(rows, panels.items(), strict=True)):
        color = colors.series[number % len(colors.series)]
        steps, means, lows, highs = _thinned(points)
        if means != lows:
            axes.fill_between(steps, lows, highs, color=color, alpha=0.2, linewidth=0)
        axes.plot(steps, means, color=color, linewidth=LINE_WIDTH, **_marked(steps))
        axes.margins(x=0.02, y=0.09)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        style(axes, colors, y_label=title)
    whole_steps(rows[-1])
    style(rows[-1], colors, "step")
    return figure


def learning_curves(name: str, title: str, alt: str, inits: Mapping[str, Sequence[Points]]) -> str:
    """Draw one value by step, a line for each trial; returns the SVG.

    Args:
        name: name of the picture, unique on its page.
        title: title of the vertical axis.
        alt: what the picture shows.
        inits: "pretrained", "parent" and "random weights" -> the (step, value) points of each of its trials.
    """
    figure, axes = _small_figure("step of fine-tuning", title)
    for init, trials in inits.items():
        number, dashes = _INITS[init]
        for trial, points in enumerate(trials):
            steps, means, _, _ = _thinned(points)
            label = "_" * (trial > 0) + init
            axes.plot(
                steps, means, color=PAGE.series[number], linestyle=dashes, linewidth=LINE_WIDTH, label=label,
                **_marked(steps),
            )  # fmt: skip
    legend(axes, PAGE, above=True, columns=len(inits))
    return as_svg(figure, name, alt)


def by_pretraining_step(name: str, title: str, alt: str, points: Mapping[int, Sequence[float]]) -> str:
    """Draw scores by the pretraining step of the checkpoint: the median over the seeds, from minimum to maximum."""
    figure, axes = _small_figure("step of pretraining", title)
    color, steps = PAGE.series[0], list(points)
    lows, highs = [min(v) for v in points.values()], [max(v) for v in points.values()]
    axes.fill_between(steps, lows, highs, color=color, alpha=0.2, linewidth=0)
    medians = [median(v) for v in points.values()]
    axes.plot(steps, medians, color=color, marker="o", markersize=MARKER_SIZE, linewidth=LINE_WIDTH)
    return as_svg(figure, name, alt)


def side_by_side(name: str, alt: str, panels: Mapping[str, Points]) -> str:
    """Draw a panel for each value by the step of pretraining; `panels` has the (step, value) points by name."""
    figure, columns = new_figure(1, len(panels), width=2.2 * len(panels), height=1.9)
    for axes, (label, points) in zip(columns, panels.items(), strict=True):
        style(axes, PAGE, "step")
        whole_steps(axes, 3)
        axes.set_title(literal(label), color=PAGE.ink, fontsize=LABEL_SIZE)
        steps, means, _, _ = _thinned(points)
        axes.plot(steps, means, color=PAGE.series[1], linewidth=LINE_WIDTH, **_marked(steps))
        axes.margins(x=0.04, y=0.1)
    return as_svg(figure, name, alt)


def draw_lines(
    colors: Colors, panels: Sequence[Panel], below: str, log_axis: bool = False, highest: float = inf
) -> "Figure":
    """Draw panels below each other, with a line for each label.

    Args:
        panels: lines with the same index in several panels have one color; a line without points is not drawn.
        below: title of the horizontal axis.
        log_axis: the horizontal axis is logarithmic, with a tick at each value.
        highest: upper limit of the vertical axis; what is above it is cut off.
    """
    from matplotlib.ticker import EngFormatter

    figure, rows = new_figure(len(panels), height=3.6 * len(panels))
    for axes, (title, lines) in zip(rows, panels, strict=True):
        for number, (label, points) in enumerate(lines):
            if points:
                _draw_line(axes, colors, number, label, list(points), list(points.values()))
        if below == "step":
            whole_steps(axes)
        elif log_axis:
            _log_axis(axes, sorted({x for _, points in lines for x in points}))
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        lowest = min((y for _, points in lines for y in points.values()), default=0.0)
        if lowest < highest and any(y > highest for _, points in lines for y in points.values()):
            axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)
        style(axes, colors, below, title)
        legend(axes, colors)
    return figure


def draw_scores(colors: Colors, names: Sequence[str], tasks: Sequence[Scores]) -> "Figure":
    """Draw a panel for each task: medians with minimum and maximum over the seeds, hollow for random weights."""
    columns = min(_PANELS_PER_ROW, len(tasks))
    rows = -(-len(tasks) // columns)
    has_random = any(values for task in tasks for values in task.random)
    above, below = (-0.12, 0.18) if has_random else (0.0, 0.0)
    figure, panels = new_figure(
        rows, columns, width=3.1 * columns + 1.2, height=rows * (0.34 * len(names) + 1.1), sharey=columns > 1
    )
    for axes, task in zip(panels, tasks, strict=False):
        for row in range(len(names)):
            color, _, marker = look_of(colors, row)
            for values, offset, fill in ((task.pretrained[row], above, color), (task.random[row], below, "none")):
                if values:
                    y = row + offset
                    axes.plot([min(values), max(values)], [y, y], color=color, linewidth=LINE_WIDTH)
                    axes.plot(
                        median(values), y, marker=marker, color=color, markerfacecolor=fill, markersize=MARKER_SIZE + 1
                    )
        axes.set_yticks(range(len(names)), [literal(name) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        style(axes, colors, task.title)
        axes.grid(axis="x", color=colors.grid, linewidth=0.8)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    return figure


def draw_classes(
    colors: Colors, panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]]
) -> "Figure":
    """Draw panels below each other, each of (title, names of the classes from left to right, values by label)."""
    figure, rows = new_figure(len(panels), height=3.6 * len(panels))
    for axes, (title, classes, lines) in zip(rows, panels, strict=True):
        for number, (label, values) in enumerate(lines.items()):
            _draw_line(axes, colors, number, label, list(range(len(classes))), values)
        axes.set_xticks(range(len(classes)), classes)
        axes.set_ylim(bottom=0.0)
        style(axes, colors, "words of the source (sentences)", title)
        legend(axes, colors)
    return figure


def _small_figure(below: str, title: str) -> tuple["Figure", "Axes"]:
    """Return a figure with one panel, half as wide as the page, and its axes."""
    figure, (axes,) = new_figure(width=WIDTH / 2, height=2.5)
    whole_steps(axes)
    style(axes, PAGE, below, title)
    return figure, axes


def _draw_line(axes: "Axes", colors: Colors, number: int, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    color, dashes, marker = look_of(colors, number)
    axes.plot(
        x, y, color=color, linestyle=dashes, marker=marker, markersize=MARKER_SIZE, linewidth=LINE_WIDTH,
        label=literal(label),
    )  # fmt: skip


def _draw_curve(axes: "Axes", colors: Colors, curve: Curve) -> None:
    train, heldout, *_ = colors.series
    whole_steps(axes)
    style(axes, colors, y_label=f"{curve.name} (nats)")
    if curve.train:
        steps, means, lows, highs = _thinned(list(curve.train.items()))
        if means != lows:
            axes.fill_between(steps, lows, highs, color=train, alpha=0.2, linewidth=0)
        axes.plot(steps, means, color=train, linewidth=LINE_WIDTH, label="training text", **_marked(steps))
    axes.plot(
        list(curve.heldout), list(curve.heldout.values()), color=heldout, linestyle="--", marker="o",
        markersize=MARKER_SIZE, linewidth=LINE_WIDTH, label="held-out text",
    )  # fmt: skip
    for (name, value), dashes in zip(curve.references.items(), ((6, 3), (1.5, 2)), strict=False):
        axes.axhline(value, color=colors.ink, linewidth=1.0, dashes=dashes)
        axes.annotate(
            f"{name}: {value:.2f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=colors.ink,
            fontsize=TICK_SIZE,
        )
    axes.margins(x=0.02, y=0.09)


def _log_axis(axes: "Axes", values: Sequence[float]) -> None:
    """Make the axis logarithmic, with a tick at each value, and its number where there is room for it."""
    axes.set_xscale("log")
    labels, room = [f"{values[0]:,g}"], _NUMBER_SHARE * log(values[-1] / values[0])
    last = values[0]
    for value in values[1:]:
        has_room = log(value / last) >= room
        labels.append(f"{value:,g}" if has_room else "")
        last = value if has_room else last
    axes.set_xticks(values, labels)
    axes.minorticks_off()


def _marked(steps: Sequence[float]) -> dict[str, Any]:
    """Return markers for a short curve, which may be one point that a line does not show."""
    return {"marker": "o", "markersize": MARKER_SIZE} if len(steps) <= _MAX_MARKED_POINTS else {}


def _thinned(points: Points) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return step, mean, smallest and largest value of at most `MAX_POINTS` groups of neighboring points."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    values = [[value for _, value in group] for group in groups]
    return (
        [group[-1][0] for group in groups],
        [sum(each) / len(each) for each in values],
        [min(each) for each in values],
        [max(each) for each in values],
    )
