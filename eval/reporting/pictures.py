"""The pictures of a task: small inline SVGs. The lines of the starts differ in style, too."""

from collections.abc import Mapping, Sequence

from multihop.eval.reporting.figures import PAGE, as_svg, new_figure, style

Points = Sequence[tuple[float, float]]

_FIRST, _SECOND, _THIRD, *_ = PAGE.series
_STYLES = {"pretrained": (_FIRST, "-"), "parent": (_THIRD, ":"), "random weights": (_SECOND, "--")}
_MOST_POINTS = 150
_FEW = 12


def learning_curves(name: str, title: str, starts: Mapping[str, Sequence[Points]]) -> str:
    """One value by step of each trial.

    Args:
        name: of the picture, unique on its page.
        title: of the vertical axis.
        starts: "pretrained", "parent" and "random weights" -> the (step, value) points of each of its trials.
    """
    figure, axes = new_figure(title, "step of fine-tuning")
    for start, trials in starts.items():
        colour, line = _STYLES[start]
        for number, points in enumerate(trials):
            steps, values = zip(*_thinned(points), strict=True)
            # A short curve may be one point, which a line does not show.
            marker = "o" if len(steps) <= _FEW else ""
            label = "_" * (number > 0) + start
            axes.plot(
                steps, values, color=colour, linestyle=line, linewidth=1.3, marker=marker, markersize=3, label=label
            )
    axes.legend(frameon=False, labelcolor=PAGE.ink, fontsize=8)
    return as_svg(figure, name, title)


def by_pretraining_step(name: str, title: str, points: Mapping[int, Sequence[float]]) -> str:
    """Scores by the pretraining step of the checkpoint: the median as a line, the seeds from minimum to maximum."""
    from statistics import median

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
        steps, values = zip(*_thinned(points), strict=True)
        axes.plot(steps, values, color=_SECOND, marker="o" * (len(steps) <= _FEW), markersize=3, linewidth=1.4)
        axes.margins(x=0.04, y=0.1)
    return as_svg(figure, name, title)


def _thinned(points: Points) -> Points:
    """At most `_MOST_POINTS` means of neighbours: a page with every step of every trial would have megabytes."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
