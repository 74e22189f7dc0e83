"""A causal model as a decoder of beam search: the source is the beginning of its sequence."""

import torch
from torch import Tensor

from multihop.pretrain.models.layers.encoder_decoder import DecoderState
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens


class CausalDecoder:
    """Continues sources token by token, with a key-value cache."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        """Wrap a model.

        Args:
            vocab_size: the tokenizer's, which may be smaller than the model's padded one.
        """
        self._model, self._vocab_size = model, vocab_size

    @property
    def device(self) -> torch.device:
        return self._model.word.weight.device

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return self._model.lm_head(hidden)[:, : self._vocab_size]

    def begin_decoding(self, source: PackedTokens[Tensor], beams: int) -> "CausalDecoderState":
        """The state of S * beams empty hypotheses.

        Args:
            source: everything that the model reads before the first token that it predicts; at least one token each.
        """
        lengths = source.cu_seqlens.diff()
        # Memory for new tokens is doubled when it is full.
        cache = self._model.new_cache(lengths.tolist(), source.max_seqlen, self.device)
        hidden = self._model.encode(source, token_indices=source.cu_seqlens[1:] - 1, cache=cache)
        state = CausalDecoderState(cache, lengths, hidden, beams)
        state.reorder(torch.arange(len(lengths), device=self.device).repeat_interleave(beams))
        return state

    def decode_step(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The hidden states (S * beams, H) after one more token of each hypothesis.

        The tokens of the first call are not read: the end of its source comes before a hypothesis's first token.
        """
        assert isinstance(state, CausalDecoderState)
        if state.source_hidden is not None:
            hidden, state.source_hidden = state.source_hidden, None
            return hidden
        state.cache.advance()
        # A hypothesis that has ended is computed along, at a position that the model has.
        at = state.positions.clamp(max=self._model.config.max_positions - 1)
        one_each = torch.arange(len(tokens) + 1, device=tokens.device)
        hidden = self._model.encode(PackedTokens(tokens, at, one_each, max_seqlen=1), cache=state.cache)
        state.positions = state.positions + 1
        return hidden


class CausalDecoderState(DecoderState):
    """The keys and values of all hypotheses, their sources' included."""

    def __init__(self, cache: KeyValueCache, positions: Tensor, source_hidden: Tensor, beams: int) -> None:
        self.cache, self.positions, self._beams = cache, positions, beams
        self.source_hidden: Tensor | None = source_hidden
        """(S * beams, H): the hidden states after the sources; None once they were used."""

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        self.cache.select(hypotheses)
        self.positions = self.positions.index_select(0, hypotheses)
        if self.source_hidden is not None:
            self.source_hidden = self.source_hidden.index_select(0, hypotheses)

    def select_sentences(self, sentences: Tensor) -> None:
        """See `DecoderState.select_sentences`."""
        beams = torch.arange(self._beams, device=sentences.device)
        self.reorder((sentences[:, None] * self._beams + beams).flatten())
