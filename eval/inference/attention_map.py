"""The attention of a translation: how much each of its tokens attends to each token of the source."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from multihop.common.errors import UserError
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import Translation, check_translates
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder
from multihop.pretrain.packed_tokens import pack_sequences


def cross_attention_module(trained: TrainedModel) -> nn.Module:
    """Return the module through which the model's decoder attends to the source.

    Raises:
        UserError: the model does not translate, or its decoder has no attention.
    """
    check_translates(trained)
    if trained.family.uses_ctc or trained.completes:
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which has no decoder that attends to the source; omit "
            "--attention-maps"
        )
    module = cast(EncoderDecoder, trained.model).last_cross_attention
    if module is None:
        raise UserError(
            f"{trained.path} is a {trained.family.display_name} with attention=none: its decoder attends to nothing; "
            "omit --attention-maps"
        )
    return module


@torch.inference_mode()
def attention_map(trained: TrainedModel, translation: Translation) -> Tensor:
    """Return (T, Ts): the attention of each token of a translation, when it was predicted, to each token of its source.

    Rows sum to 1. For a Transformer it is the mean over the heads of the last layer.

    Raises:
        UserError: as `cross_attention_module`.
    """
    module, rows = cross_attention_module(trained), list[Tensor]()
    source, target = (
        packed_to_device(pack_sequences([ids]), trained.device)
        for ids in (translation.source, [trained.special_ids["pad"], *translation.tokens[:-1]])
    )

    def keep(module: Any, given: Any) -> None:
        rows.append(module.attention_map(*given))

    hook = module.register_forward_pre_hook(keep)
    try:
        cast(EncoderDecoder, trained.model).decode_targets(source, target)
    finally:
        hook.remove()
    return torch.cat(rows)  # a decoder that attends step by step calls it once a token
