"""The recurrent encoder-decoder: a bidirectional encoder, and a decoder with or without attention to its states.

Sutskever et al. (2014) have no attention and read the reversed source, which brings its first words close to the
target's. An encoder that reads in both directions needs no reversal. The decoder starts from the encoder's last states,
layer by layer, both directions side by side, also where the papers with attention start from a function of one of them.
The output matrix is the target's embedding (Press and Wolf 2017), as in the transformer here.
"""

from torch import Generator, Tensor, arange, cat, nn, zeros

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.cross_attention import PaddedSource
from multihop.pretrain.models.layers.encoder_decoder import DecoderState, EncoderDecoder
from multihop.pretrain.models.seq2seq.config import Seq2SeqConfig
from multihop.pretrain.models.seq2seq.layers import Decoder, EncoderLayer, Memory
from multihop.pretrain.models.seq2seq.recurrence import STATES, State
from multihop.pretrain.models.seq2seq.steps import Steps, steps_of
from multihop.pretrain.packed_tokens import PackedTokens


class Seq2Seq(EncoderDecoder):
    """Encoder and decoder. Positions are those of the recurrence: it takes none."""

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
    def attends_by(self) -> nn.Module | None:
        """The decoder's attention; see `EncoderDecoder.attends_by`."""
        return self._decoder.attention

    def _read(
        self, source: PackedTokens[Tensor], sequences: Sequences, sparse_lookup_grad: bool = False
    ) -> tuple[Tensor, list[State]]:
        """States (Ns, H), packed as the sources are; the last state of each layer, (S, H) each."""
        steps = steps_of(sequences)
        table = self.word if self.source_word is None else self.source_word
        ids = source.input_ids.index_select(0, steps.order)
        x = embed(table, ids, sparse_lookup_grad and self.source_word is None)
        states = []
        for layer in self.encoder:
            x, last = layer(self.dropout(x), steps)
            states.append(tuple(part.index_select(0, steps.rows) for part in last))
        return x.index_select(0, steps.back), states

    def teacher_forced(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], sparse_lookup_grad: bool = False
    ) -> Tensor:
        """The decoder's output (Nt, H); see `EncoderDecoder.teacher_forced`."""
        sources, targets = Sequences.of(source), Sequences.of(target)
        read, states = self._read(source, sources, sparse_lookup_grad)
        steps: Steps = steps_of(targets)
        x = embed(self.word, target.input_ids.index_select(0, steps.order), sparse_lookup_grad)
        hidden: Tensor = self.decoder[0](x, steps, states, read, targets, sources)
        return hidden

    def read(self, source: PackedTokens[Tensor]) -> Tensor:
        """The encoder's states, and beside those of each source's first token the last state of all layers: (Ns, H + L
        * H) of a GRU, (Ns, H + 2 * L * H) of an LSTM; see `EncoderDecoder.read`."""
        read, states = self._read(source, Sequences.of(source))
        last = cat([part for state in states for part in state], 1)
        beside = read.new_zeros(len(read), last.shape[1])
        return cat([read, beside.index_copy(0, source.cu_seqlens[:-1], last)], 1)

    def begin(self, states: Tensor, source: PackedTokens[Tensor], beams: int) -> "RecurrentState":
        """The state of S * beams hypotheses; see `EncoderDecoder.begin`."""
        hidden, parts = self.config.hidden, STATES[self.config.cell]
        last = states[:, hidden:].index_select(0, source.cu_seqlens[:-1]).repeat_interleave(beams, 0).split(hidden, 1)
        initial = [tuple(last[at : at + parts]) for at in range(0, len(last), parts)]
        decoder, read = self._decoder, states[:, :hidden].contiguous()
        return RecurrentState(decoder.begin(initial), decoder.keep(read, Sequences.of(source)), beams)

    def advance(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The decoder's output (S * beams, H) at one more token; see `EncoderDecoder.advance`."""
        assert isinstance(state, RecurrentState)
        out, state.memory = self._decoder.step(
            embed(self.word, tokens, sparse_lookup_grad=False), state.memory, state.source
        )
        return out


class RecurrentState(DecoderState):
    """The states of the hypotheses, and the encoder's states of each source once."""

    def __init__(self, memory: Memory, source: PaddedSource, beams: int) -> None:
        self.memory, self.source, self._beams = memory, source, beams

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        states = [tuple(part.index_select(0, hypotheses) for part in state) for state in self.memory.states]
        fed = self.memory.fed
        self.memory = Memory(states, None if fed is None else fed.index_select(0, hypotheses))

    def keep(self, sentences: Tensor) -> None:
        """See `DecoderState.keep`."""
        beams = arange(self._beams, device=sentences.device)
        self.reorder((sentences[:, None] * self._beams + beams).flatten())
        self.source = self.source.keep(sentences)
