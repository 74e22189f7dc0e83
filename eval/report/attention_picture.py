"""The picture of what a translation attends to."""

from typing import TYPE_CHECKING

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.inference.attention_map import attention_map
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import Translation
from multihop.eval.report.figures import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = 0.24
"""Size of a row or column."""
_MARGIN = 1.3
"""Room for the tokens, in inches."""


def draw_map(trained: TrainedModel, found: Translation) -> "Figure":
    """`attention_map`: tokens of the translation from top to bottom, of the source from left to right.

    Raises:
        UserError: as `attending`.
    """
    from matplotlib.figure import Figure

    weights = attention_map(trained, found).cpu().numpy()
    height, width = (_MARGIN + _INCHES * size for size in weights.shape)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Greys", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
    axes.set_xticks(range(len(found.source)), _names(trained.tokenizer, found.source), rotation=90)
    axes.set_yticks(range(len(found.tokens)), _names(trained.output_tokenizer, found.tokens))
    axes.tick_params(colors=PAPER.ink, labelsize=8, length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_color(PAPER.grid)
    return figure


def _names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """`$` begins a formula."""
    return [tokenizer.id_to_token(token).replace("$", r"\$") for token in ids]
