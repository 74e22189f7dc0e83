"""Fits the embeddings of a parent to a tokenizer: rows of added tokens, and rows without a token.

A token that was added to the vocabulary begins with the mean of the rows that it was split into before.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from multihop.data_prep.tokenizers.info import TokenizerInfo

_PER_TOKEN = ("word.weight", "word_bias")
"""Parameters with a row for each token; the output layer is `word.weight`."""
_PADDED_TO, _MOST_PADDING = 8, 128
"""Vocabularies are padded to a multiple of 8, 64 or 128 rows, because matrix products are then faster."""
Read = Callable[[str, str, int, int], Tensor]
"""As `CheckpointReader.read`: the kind, the parameter's name, its first element, and the number of elements."""


def extended_parameters(
    stored: Mapping[str, list[int]], expected: Mapping[str, list[int]], tokenizer: TokenizerInfo
) -> list[str]:
    """The names of parameters with a row for each token, which have no rows for the added tokens yet.

    Args:
        stored: Shapes of the parameters that a model was saved with.
        expected: Shapes of the parameters of the model with the added tokens.
        tokenizer: The tokenizer of the latter.
    """
    if tokenizer.added is None:
        return []
    sizes = (tokenizer.vocab_size, tokenizer.base_vocab_size)
    return [
        name
        for name, shape in expected.items()
        if name in _PER_TOKEN
        and name in stored
        and (shape[0], stored[name][0]) == sizes
        and stored[name][1:] == shape[1:]
    ]


def fit_vocabulary(weights: dict[str, Tensor], model: nn.Module, tokenizer: TokenizerInfo) -> dict[str, Tensor]:
    """The weights of a model, with rows for the added tokens where they lack these, and without the rows by which the
    vocabulary was padded.

    Args:
        weights: By name; whole tensors.
        model: The model with the added tokens.
        tokenizer: Its tokenizer.
    """
    expected = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    added = 0 if tokenizer.added is None else len(tokenizer.added.parts)
    weights = {
        name: tensor[: expected[name][0] - added]
        if name in _PER_TOKEN and name in expected and _is_padded(len(tensor), expected[name][0] - added)
        else tensor
        for name, tensor in weights.items()
    }
    stored, extended = {name: list(tensor.shape) for name, tensor in weights.items()}, dict(weights)
    for name in extended_parameters(stored, expected, tokenizer):
        assert tokenizer.added is not None
        rows = [_mean([weights[name][part] for part in parts]) for parts in tokenizer.added.parts]
        extended[name] = torch.cat([weights[name], torch.stack(rows)])
    return extended


def _is_padded(rows: int, tokens: int) -> bool:
    return tokens < rows < tokens + _MOST_PADDING and rows % _PADDED_TO == 0


def read_with_added_rows(
    read: Read, shapes: Mapping[str, list[int]], names: list[str], tokenizer: TokenizerInfo
) -> Read:
    """A function that reads as `read`, but parameters as if they had rows for the added tokens.

    Args:
        shapes: Shapes of the parameters, with these rows.
        names: What `extended_parameters` returned.
    """
    if not names:
        return read
    assert tokenizer.added is not None
    base, all_parts = tokenizer.base_vocab_size, tokenizer.added.parts

    def read_slice(kind: str, name: str, start: int, numel: int) -> Tensor:
        if name not in names:
            return read(kind, name, start, numel)
        width, stop = math.prod(shapes[name][1:]), start + numel
        old = [read(kind, name, start, min(stop, base * width) - start)] if start < base * width else []
        if stop <= base * width:
            return old[0]
        rows = range(max(start // width, base), -(-stop // width))
        parts = [part for row in rows for part in all_parts[row - base]]
        first, last = min(parts), max(parts)
        # One request for all: each could take a bucket's latency.
        stored = read(kind, name, first * width, (last - first + 1) * width).view(-1, width)
        new = torch.cat([_mean([stored[part - first] for part in all_parts[row - base]]) for row in rows])
        return torch.cat([*old, new[max(start - rows[0] * width, 0) : stop - rows[0] * width]])

    return read_slice


def _mean(rows: list[Tensor]) -> Tensor:
    """The mean of rows, added up in their order, so that it does not depend on how ranks share them out."""
    total = rows[0].double()
    for row in rows[1:]:
        total = total + row
    return (total / len(rows)).float()
