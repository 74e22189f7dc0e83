"""The token types of texts in evaluation, which differ by family."""

from dataclasses import replace

import torch
from torch import Tensor

from multihop.pretrain.models.family import Family
from multihop.pretrain.packed_tokens import CLS_TYPE, PackedTokens


def with_token_types(family: Family, packed: PackedTokens[Tensor]) -> PackedTokens[Tensor]:
    """Return packed sequences with the token types that a family reads.

    Args:
        packed: sequences with the family's special tokens, and type 1 for second texts; without types, one text each.
    """
    if not family.has_token_types:
        return replace(packed, token_type_ids=None)
    if not family.cls_last:
        return packed
    types = torch.zeros_like(packed.input_ids) if packed.token_type_ids is None else packed.token_type_ids.clone()
    types[packed.cu_seqlens[1:] - 1] = CLS_TYPE
    return replace(packed, token_type_ids=types)
