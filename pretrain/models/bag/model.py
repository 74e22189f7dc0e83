"""A bag of word vectors: token embeddings without layers, trained as CBOW (Mikolov et al. 2013, section 3.1).

A masked token is predicted from the mean of the embeddings around it. CBOW has an output vector for each word; here the
output vectors are the embeddings, and a matrix maps the mean to them (the log-bilinear model of Mnih and Hinton 2007,
with one matrix for all distances).
"""

from torch import Generator, Tensor, arange, nn, searchsorted, zeros
from torch.nn import functional as F

from multihop.pretrain.models.bag.config import BagConfig
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.blocks import embed, select_tokens
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import STD
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens


class Bag(Model):
    """The embeddings and the masked-token head."""

    config: BagConfig

    def __init__(self, config: BagConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList()
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Normal; the map from contexts to outputs with the deviation that keeps their length."""
        std = self.config.hidden**-0.5 if name == "transform.weight" else STD
        nn.init.normal_(parameter, std=std, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Embeddings (N, H), or (M, H), of packed sequences; see `Model.encode`."""
        assert packed.token_type_ids is None, "a bag has no token types"
        assert cache is None, "a bag is not causal"
        return self.dropout(embed(self.word, select_tokens(packed.input_ids, token_indices), sparse_lookup_grad))

    def encode_masked(self, packed: PackedTokens[Tensor], masked: Tensor, token_indices: Tensor) -> Tensor:
        """See `Model.encode_masked`; mask tokens beside a masked token count as tokens."""
        return self._contexts(self.encode(packed), packed, token_indices)

    def _contexts(self, states: Tensor, packed: PackedTokens[Tensor], token_indices: Tensor) -> Tensor:
        """(M, H): the mean of the states (N, H) of up to `window` tokens on each side, without the token itself; zeros
        if its sequence has no other token."""
        distances = arange(1, self.config.window + 1, device=token_indices.device)
        distances = F.pad(distances, (len(distances), 0)) - F.pad(distances.flip(0), (0, len(distances)))
        around = token_indices[:, None] + distances
        sequences = searchsorted(packed.cu_seqlens, token_indices, right=True)
        inside = (around >= packed.cu_seqlens[sequences - 1][:, None]) & (
            around < packed.cu_seqlens[sequences][:, None]
        )
        total = (states[around.clamp(0, len(states) - 1)] * inside[..., None]).sum(1)
        return total / inside.sum(1, keepdim=True).clamp(min=1)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of `encode_masked`, (M, H)."""
        return F.linear(self.transform(hidden), self.word.weight, self.word_bias)

    def forward(self, packed: PackedTokens[Tensor], masked_positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats at the masked positions.

        Args:
            masked_positions: int64 (M,), which of the N tokens to predict.
            labels: int64 (M,), the original tokens there.
        """
        states = self.encode(packed, sparse_lookup_grad=True)
        context = self.transform(self._contexts(states, packed, masked_positions))
        return {"mlm": fused_linear_cross_entropy(context, self.word.weight, self.word_bias, labels)}
