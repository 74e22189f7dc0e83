"""The recurrent encoder-decoder: a bidirectional encoder, and a decoder with or without attention to its states.

Sutskever et al. (2014) have no attention and read the reversed source, which brings its first words close to the
target's. A bidirectional encoder needs no reversal. The decoder starts from the encoder's last states, layer by layer,
both directions concatenated, also where the papers with attention start from a function of one of them.
The output matrix is the target's embedding (Press and Wolf 2017), as in the transformer here.
"""

from torch import Generator, Tensor, arange, cat, nn, zeros

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.cross_attention import PaddedSource
from multihop.pretrain.models.layers.encoder_decoder import DecoderState, EncoderDecoder, embed_source
from multihop.pretrain.models.seq2seq.config import Seq2SeqConfig
from multihop.pretrain.models.seq2seq.layers import Decoder, EncoderLayer, RecurrentState
from multihop.pretrain.models.seq2seq.recurrence import STATES, State
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps, time_steps_of
from multihop.pretrain.packed_tokens import PackedTokens


class Seq2Seq(EncoderDecoder):
    """Encoder and decoder. It has no position embeddings: the recurrence knows the order."""

    config: Seq2SeqConfig
    recurrent = True

    def __init__(self, config: Seq2SeqConfig, vocab_size: int, source_vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.source_word = None if source_vocab_size is None else nn.Embedding(source_vocab_size, config.hidden)
        self.dropout = Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.decoder = nn.ModuleList([Decoder(config)])
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Uniform within 0.1 (Luong et al. 2015, section 4.1)."""
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)

    @property
    def _decoder(self) -> Decoder:
        (decoder,) = self.decoder
        assert isinstance(decoder, Decoder)
        return decoder

    @property
    def last_cross_attention(self) -> nn.Module | None:
        """The decoder's attention; see `EncoderDecoder.last_cross_attention`."""
        return self._decoder.attention

    def _encode_source(
        self, source: PackedTokens[Tensor], sequences: Sequences, sparse_lookup_grad: bool = False
    ) -> tuple[Tensor, list[State]]:
        """The encoder's outputs (Ns, H), packed as the sources are; the last state of each layer, (S, H) per part."""
        steps = time_steps_of(sequences)
        ids = source.input_ids.index_select(0, steps.order)
        x = embed_source(self.word, self.source_word, ids, sparse_lookup_grad)
        states = []
        for layer in self.encoder:
            x, last = layer(self.dropout(x), steps)
            states.append(tuple(part.index_select(0, steps.unsorted_indices) for part in last))
        return x.index_select(0, steps.inverse_order), states

    def decode_targets(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], sparse_lookup_grad: bool = False
    ) -> Tensor:
        """The decoder's outputs (Nt, H); see `EncoderDecoder.decode_targets`."""
        sources, targets = Sequences.of(source), Sequences.of(target)
        encoded, states = self._encode_source(source, sources, sparse_lookup_grad)
        steps: TimeSteps = time_steps_of(targets)
        x = embed(self.word, target.input_ids.index_select(0, steps.order), sparse_lookup_grad)
        hidden: Tensor = self.decoder[0](x, steps, states, encoded, targets, sources)
        return hidden

    def encode_source(self, source: PackedTokens[Tensor]) -> Tensor:
        """The encoder's outputs, and in further columns of each source's first token the last states of all layers:
        (Ns, H + L * H) for a GRU, (Ns, H + 2 * L * H) for an LSTM; see `EncoderDecoder.encode_source`."""
        encoded, states = self._encode_source(source, Sequences.of(source))
        last = cat([part for state in states for part in state], 1)
        columns = encoded.new_zeros(len(encoded), last.shape[1])
        return cat([encoded, columns.index_copy(0, source.cu_seqlens[:-1], last)], 1)

    def init_decoder_state(self, encoded: Tensor, source: PackedTokens[Tensor], beams: int) -> "Seq2SeqDecoderState":
        """The state of S * beams hypotheses; see `EncoderDecoder.init_decoder_state`."""
        hidden, parts = self.config.hidden, STATES[self.config.cell]
        last = encoded[:, hidden:].index_select(0, source.cu_seqlens[:-1]).repeat_interleave(beams, 0).split(hidden, 1)
        initial = [tuple(last[at : at + parts]) for at in range(0, len(last), parts)]
        decoder = self._decoder
        projected = decoder.project_source(encoded[:, :hidden].contiguous(), Sequences.of(source))
        return Seq2SeqDecoderState(decoder.init_state(initial), projected, beams)

    def decode_step(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The decoder's outputs (S * beams, H) for one more token; see `EncoderDecoder.decode_step`."""
        assert isinstance(state, Seq2SeqDecoderState)
        out, state.recurrent = self._decoder.step(
            embed(self.word, tokens, sparse_lookup_grad=False), state.recurrent, state.source
        )
        return out


class Seq2SeqDecoderState(DecoderState):
    """The recurrent states of the hypotheses, and the keys and values of each source, stored once."""

    def __init__(self, state: RecurrentState, source: PaddedSource, beams: int) -> None:
        self.recurrent, self.source, self._beams = state, source, beams

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        states = [tuple(part.index_select(0, hypotheses) for part in state) for state in self.recurrent.states]
        input_feed = self.recurrent.input_feed
        self.recurrent = RecurrentState(states, None if input_feed is None else input_feed.index_select(0, hypotheses))

    def select_sentences(self, sentences: Tensor) -> None:
        """See `DecoderState.select_sentences`."""
        beams = arange(self._beams, device=sentences.device)
        self.reorder((sentences[:, None] * self._beams + beams).flatten())
        self.source = self.source.select_(sentences)
