"""The interface that every family's model has."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from multihop.pretrain.models.config import AttentionConfig, ModelConfig
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.packed_tokens import PackedTokens


class Model(nn.Module):
    """A model over packed sequences: N tokens of S sequences in one flat tensor, without padding.

    Attributes:
        word: the token embedding, (V, E), which is also the output matrix.
        layers: the blocks, to which activation checkpointing and compilation are applied from outside.
    """

    config: ModelConfig
    word: nn.Embedding
    layers: nn.ModuleList
    recurrent: ClassVar[bool] = False
    """Whether ZeRO-3 must gather each of `layers` as a whole: a layer reads weights once per time step, as often as the
    batch decides, or reads those of its children itself."""

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Set the initial values of a matrix or embedding, by its name, as the family was published.

        Biases are 0 and the weights of norms 1 in every family.
        """
        raise NotImplementedError

    def layer_groups(self) -> list[list[nn.Parameter]]:
        """The parameters in groups from input to output: the embeddings, each of `layers`, and all others.

        The embeddings are the modules that the model registers before its blocks.
        """
        blocks = [list(layer.parameters()) for layer in self.layers]
        grouped = {id(parameter) for block in blocks for parameter in block}
        embeddings: list[nn.Parameter] = []
        for child in self.children():
            parameters = list(child.parameters())
            if child is self.layers or any(id(parameter) in grouped for parameter in parameters):
                break
            embeddings += parameters
        grouped |= {id(parameter) for parameter in embeddings}
        others = [parameter for parameter in self.parameters() if id(parameter) not in grouped]
        return [embeddings, *blocks, others]

    def new_cache(
        self, lengths: Sequence[int], new_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Any:
        """An empty cache for `encode`: causal families only. Before each further token, call its `advance()`.

        Args:
            lengths: tokens of each prompt.
            new_tokens: number of new tokens for which memory is allocated at first.
        """
        assert isinstance(self.config, AttentionConfig), "a family without attention has a cache of its own"
        return KeyValueCache(self.config, lengths, new_tokens, device, dtype)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H) of the tokens at `token_indices`; H is `config.state_width`. Each sequence is
        read alone.

        Args:
            packed: may have token types only if the family has them.
            sparse_lookup_grad: whether the token embedding also gets a gradient from the output projection; see
                `embed`.
            token_indices: int64 (M,), the tokens whose states to return, in this order; None: all.
            cache: what `new_cache` returned: the keys and values of the preceding tokens, to which those of these
                tokens are added; causal families only.
        """
        raise NotImplementedError

    def encode_masked(self, packed: PackedTokens[Tensor], masked: Tensor, token_indices: Tensor) -> Tensor:
        """Hidden states (M, H) from which `lm_head` predicts masked tokens.

        Args:
            masked: int64 (K,), all tokens that are masked; their inputs are mask tokens.
            token_indices: int64 (M,), those of them that are predicted.
        """
        return self.encode(packed, token_indices=token_indices)

    def hidden_states(self, packed: PackedTokens[Tensor]) -> list[Tensor]:
        """The states between the layers, (N, H) each, numbered as in transformers' `hidden_states`: 0 is the output of
        the embeddings, i that of layer i, and the last is the result of `encode`, after a final norm if there is one.
        """
        states: list[Tensor] = []
        # A layer that is applied several times, like ALBERT's, is recorded each time.
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for layer in self.layers]
        try:
            last = self.encode(packed)
        finally:
            for hook in hooks:
                hook.remove()
        return [*states, last]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        raise NotImplementedError

    def pool(self, first: Tensor) -> Tensor:
        """Where the family's pooling is "pooler": (S, H) -> (S, H), from the first token's state of each sequence."""
        raise NotImplementedError
