"""Picture of the cross-attention weights of a translation."""

from typing import TYPE_CHECKING

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.inference.attention_map import attention_map
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import Translation
from multihop.eval.report.plot_style import PAPER, TICK_SIZE, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = 0.24
"""Height of a row and width of a column, in inches."""
_MARGIN = 1.3
"""Space for the tokens, in inches."""


def draw_map(trained: TrainedModel, translation: Translation) -> "Figure":
    """Draw `attention_map`: tokens of the translation from top to bottom, tokens of the source from left to right.

    Raises:
        UserError: the model does not translate, or its decoder has no attention.
    """
    weights = attention_map(trained, translation).cpu().numpy()
    height, width = (_MARGIN + _INCHES * size for size in weights.shape)
    figure, (axes,) = new_figure(width=width, height=height)
    axes.imshow(weights, cmap="Greys", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
    axes.set_xticks(range(len(translation.source)), _names(trained.tokenizer, translation.source), rotation=90)
    axes.set_yticks(range(len(translation.tokens)), _names(trained.output_tokenizer, translation.tokens))
    axes.tick_params(colors=PAPER.ink, labelsize=TICK_SIZE, length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_color(PAPER.grid)
    return figure


def _names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [literal(tokenizer.id_to_token(token)) for token in ids]
