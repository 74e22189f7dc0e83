"""Figures as PNG, and as inline SVG whose colours follow the page: light or dark.

The data colours are from Okabe and Ito's palette, which is safe for colour-blind readers. In the page, they, ink and
grid are CSS variables.
"""

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Colours:
    """The colours of a figure; `#rrggbb` each."""

    ink: str
    grid: str
    series: tuple[str, ...]


# Colours that nothing else has, replaced by the page's variables once matplotlib has written them.
_VARIABLES = {
    f"#0102{number:02d}": f"var(--{name})"
    for number, name in enumerate(("ink", "line", "first", "second", "third", "fourth", "fifth", "sixth"))
}
_PLACEHOLDERS = tuple(_VARIABLES)
PAGE = Colours(_PLACEHOLDERS[0], _PLACEHOLDERS[1], _PLACEHOLDERS[2:])
"""Colours for `as_svg`: variables of the page."""
PAPER = Colours("#333333", "#e6e6e6", ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b27700", "#6b6b6b"))
"""Colours for `as_png`, on white."""
# Several pictures of one page would have the same; the ids that are referred to are hashes.
_NUMBERED_ID = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
_PROLOGUE = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def new_figure(title: str, below: str) -> tuple["Figure", "Axes"]:
    """A small figure for `as_svg` with one panel, whose horizontal axis is of steps.

    Args:
        title: of the vertical axis.
        below: title of the horizontal axis.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.5), layout="constrained")
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style(axes, PAGE)
    axes.set_ylabel(title, color=PAGE.ink, fontsize=9)
    axes.set_xlabel(below, color=PAGE.ink, fontsize=9)
    return figure, axes


def style(axes: "Axes", colours: Colours) -> None:
    """Ticks, spines and a horizontal grid."""
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=colours.ink, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours.ink)
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def as_png(figure: "Figure") -> bytes:
    """On white; without the version of matplotlib in it, the same numbers give the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


def as_svg(figure: "Figure", name: str, title: str) -> str:
    """A figure that was drawn with `PAGE`.

    Args:
        name: of the picture, unique on its page.
        title: for readers who do not see it.
    """
    import matplotlib

    figure.patch.set_alpha(0)
    out = io.StringIO()
    # Text as text, in the reader's font; without the date, the same numbers give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", out.getvalue()))
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = _NUMBERED_ID.sub("", svg)
    return re.sub(r' width="[^"]*"', f' role="img" aria-label="{title}"', svg, count=1)
