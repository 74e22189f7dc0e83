"""The interface of the families that translate: an encoder and a decoder over packed pairs."""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.layers.vocabulary import fused_linear_cross_entropy
from multihop.pretrain.packed_tokens import PackedTokens


class DecoderState(ABC):
    """The hypotheses of some sentences while they grow: S * beams, those of a sentence side by side.

    What belongs to a source is kept once a sentence.
    """

    @abstractmethod
    def reorder(self, hypotheses: Tensor) -> None:
        """Hypothesis i becomes the one that was at hypotheses[i], int64 (S * beams,), which is one of its sentence."""

    @abstractmethod
    def keep(self, sentences: Tensor) -> None:
        """Keep only these sentences, int64 (S',), in this order: finished ones leave the batch."""


class EncoderDecoder(Model):
    """A model of a target given its source. Ns and Nt tokens of S sources and targets are packed without padding.

    Attributes:
        word: the target's embedding, which is the output matrix too, and the source's where the vocabulary is joint.
        source_word: the source's embedding where it has a vocabulary of its own, else None.
        encoder, decoder: the blocks of each; `layers` has all.
    """

    source_word: nn.Embedding | None
    encoder: nn.ModuleList
    decoder: nn.ModuleList
    word_bias: nn.Parameter

    # Registered once, by the names of encoder and decoder: state_dict would repeat modules that are in two lists.
    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """All blocks, to which activation checkpointing and compilation are applied from outside."""
        return nn.ModuleList([*self.encoder, *self.decoder])

    def forward(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], labels: Tensor, label_smoothing: float
    ) -> dict[str, Tensor]:
        """ "translation": sum of the cross-entropies in nats of predicting the labels; fp32 ().

        Args:
            source: each source's tokens and an end token, Ns in all.
            target: a start token and each target's tokens, Nt in all.
            labels: int64 (Nt,), the token after each: each target's tokens and an end token.
            label_smoothing: as in `fused_linear_cross_entropy`; in evaluation mode 0.
        """
        hidden = self.teacher_forced(source, target, sparse_lookup_grad=True)
        smoothing = label_smoothing if self.training else 0.0
        return {"translation": fused_linear_cross_entropy(hidden, self.word.weight, self.word_bias, labels, smoothing)}

    @property
    def attends_by(self) -> nn.Module | None:
        """The module through which the decoder attends to the source, the last one of several; None: it does not.

        Its `map_of` takes the arguments of its `forward` for one pair, and returns how much each token of the target
        attends to each token of the source: (T, Ts), rows that sum to 1.
        """
        raise NotImplementedError

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of the decoder's output (M, H)."""
        return F.linear(hidden, self.word.weight, self.word_bias)

    def teacher_forced(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], sparse_lookup_grad: bool = False
    ) -> Tensor:
        """The decoder's output (Nt, H) at each token of known targets, to which `lm_head` applies.

        Args:
            source, target: as in `forward`.
            sparse_lookup_grad: as in `Model.encode`.
        """
        raise NotImplementedError

    def read(self, source: PackedTokens[Tensor]) -> Tensor:
        """The encoder's states of some sources, for `begin`: (Ns, H), or wider if a family passes on more than these.

        Args:
            source: as in `forward`.
        """
        raise NotImplementedError

    def begin(self, states: Tensor, source: PackedTokens[Tensor], beams: int) -> DecoderState:
        """The state of S * beams hypotheses without a token.

        Args:
            states: what `read` returned for the source.
            beams: hypotheses of each sentence.
        """
        raise NotImplementedError

    def advance(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The decoder's output (S * beams, H), to which `lm_head` applies, at one more token of each hypothesis.

        Args:
            tokens: int64 (S * beams,): start tokens at first.
        """
        raise NotImplementedError
