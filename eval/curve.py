"""The picture of a run's losses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multihop.eval.reporting.figures import as_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """One loss by step, in nats."""

    name: str
    train: dict[int, float]
    heldout: dict[int, float]
    references: dict[str, float]
    """Losses that are drawn as horizontal lines, by their label."""


def draw(curves: list[Curve]) -> bytes:
    """A PNG with a panel for each curve, the first one larger.

    The colours are from Okabe and Ito's palette, which is safe for colour-blind readers; lines differ in style too.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2 if len(curves) == 1 else 6.4), dpi=160, layout="constrained")
    panels = figure.subplots(
        len(curves), sharex=True, squeeze=False, gridspec_kw={"height_ratios": [2, *[1] * (len(curves) - 1)]}
    )
    for (axes,), curve in zip(panels, curves, strict=True):
        _draw_panel(axes, curve)
    # Above the lines: within them, any place is on one of the references in some run.
    panels[0, 0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    panels[-1, 0].set_xlabel("step")
    return as_png(figure)


def _draw_panel(axes: "Axes", curve: Curve) -> None:
    axes.plot(list(curve.train), list(curve.train.values()), color="#0072B2", linewidth=1.4, label="training text")
    held_out = list(curve.heldout), list(curve.heldout.values())
    axes.plot(*held_out, color="#D55E00", linewidth=1.8, marker="o", markersize=4.5, label="held-out text")
    for (name, value), dashes in zip(curve.references.items(), ((6, 3), (1.5, 2)), strict=False):
        axes.axhline(value, color="#555555", linewidth=1.2, dashes=dashes)
        axes.annotate(
            f"{name}: {value:.2f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color="#555555",
            fontsize=9,
        )
    axes.margins(x=0.02, y=0.09)
    axes.set_ylabel(f"{curve.name} (nats)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
