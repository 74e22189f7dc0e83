"""A family's weights under the names of transformers, and back."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.config import AttentionConfig, ModelConfig
from multihop.pretrain.models.families import FAMILIES, family_module
from multihop.pretrain.models.layers.huggingface_names import Names, Stored

_SOURCE_WORD = "source_word.weight"


def names_of(family: str, two_vocabularies: bool = False) -> Names:
    """The declaration in `pretrain/models/FAMILY/huggingface.py`.

    Args:
        two_vocabularies: whether source and target have separate vocabularies.

    Raises:
        UserError: the family has no counterpart in transformers.
    """
    if FAMILIES[family].auto_class is None:
        raise UserError(f"transformers has no class for family {family}, so it can be neither exported nor imported")
    names: Names = family_module(family, "huggingface").NAMES
    return names.with_two_vocabularies() if two_vocabularies else names


def to_huggingface(model: ModelConfig, pad: int, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor in transformers for our parameters, one tensor at a time, in the model's order.

    Args:
        pad: pad_token_id; used only for families whose positions start after it.
        weights: all weights, by our names.
    """
    two_vocabularies = _SOURCE_WORD in weights
    names = names_of(model.family, two_vocabularies)
    for theirs, ours in _pairs(model, two_vocabularies).items():
        parts = [weights[name] for name in ours]
        if ours[0] in names.row_vectors:
            parts = [part[None] for part in parts]
        if (stored := _stored(names, ours[0])) is not None:
            parts = [_to_stored(stored, model, part) for part in parts]
        if names.conv1d and ours[0].startswith("layers."):
            parts = [part.T if part.ndim == 2 else part for part in parts]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, names.concatenation_dim)
        if ours == ["position.weight"]:
            if unused := names.unused_positions(pad):
                tensor = torch.cat([tensor.new_zeros(unused, tensor.shape[1]), tensor])
            if names.only_token_type:
                yield names.only_token_type, tensor.new_zeros(1, tensor.shape[1])
        yield theirs, tensor


def from_huggingface(
    model: ModelConfig, pad: int, weights: Mapping[str, Tensor], two_vocabularies: bool = False
) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`: float32 by our names; views of `weights` where they are float32.

    The embedding of a family's only token type is added to its positions, which has the same effect: adding it to the
    token embedding would change the output matrix.
    """
    names = names_of(model.family, two_vocabularies)
    converted = {}
    for theirs, ours in _pairs(model, two_vocabularies).items():
        if theirs not in weights:
            continue
        tensor = weights[theirs].float()
        if ours == ["position.weight"]:
            tensor = tensor[names.unused_positions(pad) :]
            if names.only_token_type:
                tensor = tensor + weights[names.only_token_type].float()
        if ours[0] in names.row_vectors:
            tensor = tensor[0]
        if (stored := _stored(names, ours[0])) is not None:
            tensor = _from_stored(stored, tensor, is_vector=ours[0].endswith("bias"))
        parts = tensor.chunk(len(ours), names.concatenation_dim)
        for name, part in zip(ours, parts, strict=True):
            transposed = names.conv1d and name.startswith("layers.") and part.ndim == 2
            converted[name] = part.T if transposed else part
    return converted


def _stored(names: Names, name: str) -> Stored | None:
    blocks, _, in_block = name.partition(".")
    return names.stored.get(in_block.partition(".")[2] if blocks in names.blocks else name)


def _to_stored(stored: Stored, model: ModelConfig, tensor: Tensor) -> Tensor:
    assert isinstance(model, AttentionConfig)
    return (tensor.T if stored.transposed else tensor).reshape(stored.sizes(model.hidden, model.heads))


def _from_stored(stored: Stored, tensor: Tensor, is_vector: bool) -> Tensor:
    ours = tensor.flatten() if is_vector else tensor.flatten(1)
    return ours.T if stored.transposed else ours


def _pairs(model: ModelConfig, two_vocabularies: bool) -> dict[str, list[str]]:
    """For each tensor in transformers, our parameters in it, in the order of their concatenation."""
    names, pairs = names_of(model.family, two_vocabularies), dict[str, list[str]]()
    for name, _ in build_model_on_meta(model, 1, 1 if two_vocabularies else None).named_parameters():
        module, _, leaf = name.rpartition(".")
        if name in names.modules:
            theirs = names.modules[name]
        elif name.partition(".")[0] in names.blocks:
            blocks, layer, part = name.split(".", 2)
            modules = names.blocks[blocks].modules
            inner = modules[part] if part in modules else f"{modules[part.rpartition('.')[0]]}.{leaf}"
            theirs = f"{names.blocks[blocks].prefix.format(layer)}{inner}"
        else:
            theirs = f"{names.modules[module]}.{leaf}"
        pairs.setdefault(theirs, []).append(name)
    return pairs
