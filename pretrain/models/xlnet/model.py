"""XLNet (Yang et al. 2019), after its published code and transformers."""

from torch import Generator, Tensor, arange, full, nn, where, zeros
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import STD
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.xlnet.config import XlnetConfig
from multihop.pretrain.models.xlnet.layers import XlnetLayer, distance_encodings, layout_of
from multihop.pretrain.packed_tokens import PackedTokens


class Xlnet(Model):
    """The encoder, its query stream, and the output layer.

    Where a factorization order is an argument, it is int64 (N,): each token's place in the order of its sequence, which
    sees the tokens before it, or -1 for tokens that all tokens see. `is_memory`, bool (N,), is true at the first tokens
    of a sequence that are its memory, which see one another alone and get no gradient (section 2.4); None: at none.
    """

    config: XlnetConfig

    def __init__(self, config: XlnetConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.mask_embedding = nn.Parameter(zeros(1, config.hidden))
        self.layers = nn.ModuleList(XlnetLayer(config) for _ in range(config.layers))
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.dropout = Dropout(config.dropout)

    def layer_groups(self) -> list[list[nn.Parameter]]:
        """See `Model.layer_groups`; the embedding of what is predicted is one of the embeddings."""
        embeddings, *blocks, others = super().layer_groups()
        others = [parameter for parameter in others if parameter is not self.mask_embedding]
        return [[*embeddings, self.mask_embedding], *blocks, others]

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Normal, as in the published code."""
        nn.init.normal_(parameter, std=STD, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
        factorization_order: Tensor | None = None,
        is_memory: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H), of packed sequences; see `Model.encode`.

        Args:
            factorization_order: the states are those of the query stream, which does not see the tokens themselves;
                None: those of the content stream, in which all tokens see all.
        """
        assert cache is None, "XLNet is not causal"
        device, dtype = packed.input_ids.device, self.word.weight.dtype
        content, query, predicted = self.dropout(embed(self.word, packed.input_ids, sparse_lookup_grad)), None, None
        if factorization_order is not None:
            predicted = arange(len(content), device=device) if token_indices is None else token_indices
            if not len(predicted):  # all ranks must call the same modules
                predicted = zeros(1, dtype=predicted.dtype, device=device)
            query = self.dropout(self.mask_embedding.expand(len(predicted), -1))
        layout = layout_of(packed, factorization_order, predicted, is_memory)
        encodings = self.dropout(distance_encodings(layout.longest, self.config.hidden, device, dtype))
        *inner, last = self.layers
        for layer in inner:
            content, query = layer(_without_gradient(content, is_memory), query, layout, encodings)
        content = _without_gradient(content, is_memory)
        if query is None:
            states, _ = last(content, None, layout, encodings, token_indices)
        else:
            _, states = last(content, query, layout, encodings, keep_content=False)
            states = states if token_indices is None else states[: len(token_indices)]
        hidden: Tensor = self.dropout(states)
        return hidden

    def encode_masked(self, packed: PackedTokens[Tensor], masked: Tensor, token_indices: Tensor) -> Tensor:
        """States (M, H) of the query stream; see `Model.encode_masked`. No token sees the masked ones."""
        return self.encode(packed, token_indices=token_indices, factorization_order=_last_in_order(packed, masked))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(hidden, self.word.weight, self.word_bias)

    def forward(
        self,
        packed: PackedTokens[Tensor],
        masked_positions: Tensor,
        labels: Tensor,
        factorization_order: Tensor | None = None,
        is_memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of the tokens at some positions, given those before them in the order.

        Args:
            masked_positions: int64 (M,), which of the N tokens to predict.
            labels: int64 (M,), these tokens.
            factorization_order: None: none of them is seen by any token, as in masked language modeling.
        """
        order = factorization_order if factorization_order is not None else _last_in_order(packed, masked_positions)
        hidden = self.encode(
            packed,
            sparse_lookup_grad=True,
            token_indices=masked_positions,
            factorization_order=order,
            is_memory=is_memory,
        )
        return {"plm": fused_linear_cross_entropy(hidden, self.word.weight, self.word_bias, labels)}


def _without_gradient(content: Tensor, is_memory: Tensor | None) -> Tensor:
    return content if is_memory is None else where(is_memory[:, None], content.detach(), content)


def _last_in_order(packed: PackedTokens[Tensor], hidden: Tensor) -> Tensor:
    """The order in which all tokens but the `hidden` ones, int64 (K,), are seen by all."""
    order = full(packed.input_ids.shape, -1, device=hidden.device)
    order[hidden] = 0
    return order
