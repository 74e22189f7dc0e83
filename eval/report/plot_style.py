"""The style of all pictures, as PNG and as inline SVG whose colors follow the page, light or dark.

The colors of data are from Okabe and Ito's palette, which is safe for color-blind readers; lines with the same color
differ in dashes and markers. In a page they, ink and grid are CSS variables.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Colors:
    """The colors of a figure; `#rrggbb` each."""

    ink: str
    grid: str
    series: tuple[str, ...]


WIDTH = 8.0
"""Width of a picture as wide as the page, in inches. Text of 9 points gives all pictures the same letter size."""
LABEL_SIZE = 9
TICK_SIZE = 8
LINE_WIDTH = 1.5
MARKER_SIZE = 4
_GRID_WIDTH = 0.8
_REM_PER_INCH = 8.5
"""Scale of pictures in the page: one of `WIDTH` inches is as wide as the page, 68 rem."""
_DASHES = ("-", "--", ":")
_MARKERS = ("o", "s", "^")
# Colors that nothing else has, replaced by the page's variables once matplotlib has written them.
_VARIABLES = {
    f"#0102{number:02d}": f"var(--{name})"
    for number, name in enumerate(("ink", "line", "first", "second", "third", "fourth", "fifth", "sixth"))
}
_PLACEHOLDERS = tuple(_VARIABLES)
PAGE = Colors(_PLACEHOLDERS[0], _PLACEHOLDERS[1], _PLACEHOLDERS[2:])
"""Colors for `as_svg`: variables of the page."""
PAPER = Colors("#333333", "#e6e6e6", ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b27700", "#6b6b6b"))
"""Colors for `as_png`, on white."""
# Several pictures of one page would repeat these ids; the ids that are referred to are hashes.
_NUMBERED_ID = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
_PROLOGUE = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def new_figure(
    rows: int = 1,
    columns: int = 1,
    width: float = WIDTH,
    height: float = 3.6,
    heights: Sequence[float] | None = None,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple["Figure", list["Axes"]]:
    """Return a figure and its panels, row by row.

    Args:
        width, height: size of the figure in inches.
        heights: relative heights of the rows; None: all are equal.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(
        rows, columns, squeeze=False, sharex=sharex, sharey=sharey, gridspec_kw={"height_ratios": heights}
    )
    return figure, list(panels.ravel())


def style(axes: "Axes", colors: Colors, x_label: str = "", y_label: str = "") -> None:
    """Set the ticks, the spines, a horizontal grid and the labels of the axes, which should have their units."""
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=colors.ink, labelsize=TICK_SIZE)
    for text in (axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()):
        text.set(color=colors.ink, fontsize=TICK_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colors.ink)
    axes.grid(axis="y", color=colors.grid, linewidth=_GRID_WIDTH)
    axes.set_axisbelow(True)
    if x_label:
        axes.set_xlabel(literal(x_label), color=colors.ink, fontsize=LABEL_SIZE)
    if y_label:
        axes.set_ylabel(literal(y_label), color=colors.ink, fontsize=LABEL_SIZE)


def legend(axes: "Axes", colors: Colors, above: bool = False, columns: int = 1) -> None:
    """Draw a legend outside the axes, where it cannot hide a line: to their right, or above them."""
    axes.legend(
        frameon=False, labelcolor=colors.ink, fontsize=TICK_SIZE, ncols=columns, borderaxespad=0.3,
        loc="lower left" if above else "center left", bbox_to_anchor=(0.0, 1.0) if above else (1.0, 0.5),
    )  # fmt: skip


def whole_steps(axes: "Axes", most: int | None = None) -> None:
    """Put ticks of the horizontal axis at whole numbers only, at most `most` of them, with thousands separated."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=most or "auto"))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def look_of(colors: Colors, number: int) -> tuple[str, str, str]:
    """Return color, dashes and marker of a line; after the last color they repeat with other dashes and markers."""
    round_, index = divmod(number, len(colors.series))
    return colors.series[index], _DASHES[round_ % len(_DASHES)], _MARKERS[round_ % len(_MARKERS)]


def literal(text: str) -> str:
    """Escape what matplotlib interprets: `$` begins a formula, and a leading `_` hides a label from the legend."""
    text = text.replace("$", r"\$")
    return text.replace("_", "\u200b_", 1) if text.startswith("_") else text


def as_png(figure: "Figure") -> bytes:
    """Encode a figure on white, without the version of matplotlib, so that equal numbers give equal bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


def as_svg(figure: "Figure", name: str, alt: str) -> str:
    """Encode a figure that was drawn with `PAGE`.

    Args:
        name: name of the picture, unique on its page.
        alt: what the picture shows, for readers who do not see it.
    """
    import matplotlib

    figure.patch.set_alpha(0)
    out = io.StringIO()
    # Text stays text, in the reader's font; without the date, equal numbers give equal bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", out.getvalue()))
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    svg = _NUMBERED_ID.sub("", svg)
    # A picture is as wide as its share of the page, so that all pictures have the same letter size.
    label = f' style="max-width: {_REM_PER_INCH * figure.get_figwidth():g}rem" role="img" aria-label="{escape(alt)}"'
    return re.sub(r' width="[^"]*"', lambda _: label, svg, count=1)
