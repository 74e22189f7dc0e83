"""The picture of a run's losses."""

import io
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Cross-entropies in nats a piece, by step."""

    train: dict[int, float]
    heldout: dict[int, float]
    unigram: float | None
    uniform: float | None


def draw(curve: Curve) -> bytes:
    """A PNG. Colours of Okabe and Ito's palette, which the colour-blind can tell apart; lines differ in form too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = sorted(curve.train)
    axes.plot(steps, [curve.train[s] for s in steps], color="#0072B2", linewidth=1.4, label="training text")
    steps = sorted(curve.heldout)
    axes.plot(
        steps,
        [curve.heldout[s] for s in steps],
        color="#D55E00",
        linewidth=1.8,
        marker="o",
        markersize=4.5,
        label="held-out text",
    )
    for value, name, dashes in ((curve.unigram, "unigram model", (6, 3)), (curve.uniform, "uniform guess", (1.5, 2))):
        if value is not None:
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
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats a piece")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if curve.train or curve.heldout:
        axes.legend(frameon=False, loc="center right")
    picture = io.BytesIO()
    # Without the version of matplotlib in it, the same numbers give the same bytes.
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
