"""The interface of the families that translate without a decoder: each token of the source emits a token or a blank."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens


class CtcTranslator(Model):
    """An encoder whose states emit the target (Graves et al. 2006): Ns and Nt tokens of S sources and targets.

    Attributes:
        word: the output matrix, and the source's embedding where the vocabulary is joint.
        source_word: the source's embedding; None where the vocabulary is joint.
    """

    source_word: nn.Embedding | None
    word_bias: nn.Parameter

    def forward(self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], blank: int) -> dict[str, Tensor]:
        """{"ctc": minus the sum of the targets' log probabilities in nats, fp32 ()}.

        Args:
            source: each source's tokens and an end token, Ns in all.
            target: each target's tokens, Nt in all, for which its source has enough states: see
                `multihop.pretrain.objectives.ctc.min_states`.
            blank: the token that stands for the blank, and is in no target.
        """
        log_probabilities = self.emission_log_probabilities(self.encode(source))
        lengths = source.cu_seqlens.diff()
        padded = log_probabilities.new_zeros(source.max_seqlen, len(lengths), log_probabilities.shape[1])
        sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        padded = padded.index_put((source.positions, sequences), log_probabilities)
        # torch has no deterministic gradient of it on a GPU.
        on_host = padded.is_cuda and torch.are_deterministic_algorithms_enabled()
        device = torch.device("cpu") if on_host else padded.device
        emitted, targets, sizes, of_targets = (
            each.to(device) for each in (padded, target.input_ids, lengths, target.cu_seqlens.diff())
        )
        return {"ctc": F.ctc_loss(emitted, targets, sizes, of_targets, blank, reduction="sum").to(padded.device)}

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of the encoder's outputs (M, H), those of the blank included."""
        return F.linear(hidden, self.word.weight, self.word_bias)

    def emission_log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log probabilities (M, V), fp32 at least, of what each of the encoder's outputs (M, H) emits."""
        logits = self.lm_head(hidden)
        return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
