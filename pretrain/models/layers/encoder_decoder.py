"""The interface of the families that translate: an encoder and a decoder over packed pairs."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens


def embed_source(word: nn.Embedding, source_word: nn.Embedding | None, ids: Tensor, sparse_lookup_grad: bool) -> Tensor:
    """Embeddings (Ns, H) of tokens of sources.

    Args:
        word, source_word: as in `EncoderDecoder`.
        ids: int64 (Ns,).
        sparse_lookup_grad: as in `embed`; without effect on an embedding of the source alone, which is no output
            matrix.
    """
    if source_word is None:
        return embed(word, ids, sparse_lookup_grad)
    return embed(source_word, ids, sparse_lookup_grad=False)


class DecoderState(ABC):
    """The state of a beam search's S * beams hypotheses, those of a sentence next to each other.

    What depends on the source alone is stored once per sentence.
    """

    @abstractmethod
    def reorder(self, hypotheses: Tensor) -> None:
        """Replace hypothesis i by the one at hypotheses[i], int64 (S * beams,), which is of the same sentence."""

    @abstractmethod
    def select_sentences(self, sentences: Tensor) -> None:
        """Keep only these sentences, int64 (S',), in this order; the finished ones leave the batch."""


class EncoderDecoder(Model):
    """A model of a target given its source: Ns and Nt tokens of S sources and targets, packed without padding.

    Attributes:
        word: the target's embedding, which is the output matrix too, and the source's where the vocabulary is joint.
        source_word: the source's embedding; None where the vocabulary is joint.
        encoder, decoder: the blocks of each; `layers` has all.
    """

    source_word: nn.Embedding | None
    encoder: nn.ModuleList
    decoder: nn.ModuleList
    word_bias: nn.Parameter

    # A property, because state_dict would repeat modules that are registered in two lists.
    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """All blocks, to which activation checkpointing and compilation are applied from outside."""
        return nn.ModuleList([*self.encoder, *self.decoder])

    def forward(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], labels: Tensor, label_smoothing: float
    ) -> dict[str, Tensor]:
        """{"translation": sum of the cross-entropies in nats of predicting the labels, fp32 ()}.

        Args:
            source: each source's tokens and an end token, Ns in all.
            target: a start token and each target's tokens, Nt in all.
            labels: int64 (Nt,), the token to predict at each: each target's tokens and an end token.
            label_smoothing: as in `fused_linear_cross_entropy`; in evaluation mode 0.
        """
        hidden = self.decode_targets(source, target, sparse_lookup_grad=True)
        smoothing = label_smoothing if self.training else 0.0
        return {"translation": fused_linear_cross_entropy(hidden, self.word.weight, self.word_bias, labels, smoothing)}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.word.weight.device

    @property
    def last_cross_attention(self) -> nn.Module | None:
        """The decoder's last module that attends to the source; None if it has none.

        Its `attention_map` takes the arguments of its `forward` for a single pair, and returns the attention weights
        of each target token over the source tokens: (T, Ts), whose rows sum to 1.
        """
        raise NotImplementedError

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of the decoder's output (M, H)."""
        return F.linear(hidden, self.word.weight, self.word_bias)

    def decode_targets(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], sparse_lookup_grad: bool = False
    ) -> Tensor:
        """The decoder's outputs (Nt, H) for known targets (teacher forcing), the inputs of `lm_head`.

        Args:
            source, target: as in `forward`.
            sparse_lookup_grad: as in `Model.encode`.
        """
        raise NotImplementedError

    def begin_decoding(self, source: PackedTokens[Tensor], beams: int) -> DecoderState:
        """The state of S * beams empty hypotheses for some sources, as in `forward`; `decode_step` extends them."""
        return self.init_decoder_state(self.encode_source(source), source, beams)

    def encode_source(self, source: PackedTokens[Tensor]) -> Tensor:
        """The encoder's outputs for some sources, (Ns, H), with further columns if `init_decoder_state` needs more.

        Args:
            source: as in `forward`.
        """
        raise NotImplementedError

    def init_decoder_state(self, encoded: Tensor, source: PackedTokens[Tensor], beams: int) -> DecoderState:
        """The state of S * beams empty hypotheses.

        Args:
            encoded: the result of `encode_source` for the source.
            beams: number of hypotheses per sentence.
        """
        raise NotImplementedError

    def decode_step(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """Append a token to each hypothesis; returns the decoder's outputs (S * beams, H), the inputs of `lm_head`.

        Args:
            tokens: int64 (S * beams,); start tokens in the first call.
        """
        raise NotImplementedError
