"""The Transformer (Vaswani et al. 2017): an encoder and a decoder of attention and feed-forward layers."""

import math

from torch import Generator, Tensor, nn, zeros

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.cross_attention import PaddedSource, Pairs
from multihop.pretrain.models.layers.encoder_decoder import DecoderState, EncoderDecoder
from multihop.pretrain.models.layers.sinusoids import sinusoids
from multihop.pretrain.models.transformer.beam_cache import BeamCache
from multihop.pretrain.models.transformer.config import TransformerConfig
from multihop.pretrain.models.transformer.layers import EPS, DecoderLayer, EncoderLayer


class Transformer(EncoderDecoder):
    """Encoder and decoder; the target's embedding is the output matrix, and the source's if the vocabulary is joint."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, vocab_size: int, source_vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.source_word = None if source_vocab_size is None else nn.Embedding(source_vocab_size, config.hidden)
        learned = config.positions == "learned"
        self.source_position = nn.Embedding(config.max_positions, config.hidden) if learned else None
        self.position = nn.Embedding(config.max_positions, config.hidden) if learned else None
        self.dropout = Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        pre_norm = config.norm == "pre"
        self.encoder_norm = nn.LayerNorm(config.hidden, eps=EPS) if pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.hidden, eps=EPS) if pre_norm else nn.Identity()
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Uniform within sqrt(6 / (rows + columns)) (Glorot and Bengio 2010, equation 16), and embeddings normal with a
        standard deviation of hidden**-0.5, as in tensor2tensor."""
        if name in ("word.weight", "position.weight", "source_word.weight", "source_position.weight"):
            nn.init.normal_(parameter, std=self.config.hidden**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)

    @property
    def attends_by(self) -> nn.Module:
        """The cross-attention of the last layer; see `EncoderDecoder.attends_by`."""
        last = self.decoder[-1]
        assert isinstance(last, DecoderLayer)
        return last.cross_attention

    def read(
        self, source_ids: Tensor, source_positions: Tensor, source_cu_seqlens: Tensor, source_max_seqlen: int
    ) -> Tensor:
        """The encoder's states (Ns, H); see `EncoderDecoder.read`."""
        return self._read(
            source_ids, source_positions, Sequences(source_cu_seqlens, source_max_seqlen, len(source_ids))
        )

    def _read(self, ids: Tensor, positions: Tensor, sequences: Sequences, tied: bool = False) -> Tensor:
        table = self.word if self.source_word is None else self.source_word
        x = self._embed(table, self.source_position, ids, positions, tied and self.source_word is None)
        for layer in self.encoder:
            x = layer(x, sequences)
        states: Tensor = self.encoder_norm(x)
        return states

    def _embed(
        self, table: nn.Embedding, learned: nn.Embedding | None, ids: Tensor, positions: Tensor, tied: bool
    ) -> Tensor:
        """Section 3.4: embeddings times sqrt(H), and positions added."""
        x = embed(table, ids, tied) * math.sqrt(self.config.hidden)
        if learned is not None:
            return self.dropout(x + learned(positions))
        places = sinusoids(self.config.max_positions, self.config.hidden, x.device, x.dtype)
        return self.dropout(x + places.index_select(0, positions))

    def teacher_forced(
        self,
        source_ids: Tensor,
        source_positions: Tensor,
        source_cu_seqlens: Tensor,
        source_max_seqlen: int,
        input_ids: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tied: bool = False,
    ) -> Tensor:
        """The decoder's output (Nt, H); see `EncoderDecoder.teacher_forced`."""
        keys = Sequences(source_cu_seqlens, source_max_seqlen, len(source_ids))
        pairs = Pairs(Sequences(cu_seqlens, max_seqlen, len(input_ids)), keys)
        source = self._read(source_ids, source_positions, keys, tied)
        x = self._embed(self.word, self.position, input_ids, positions, tied)
        for layer in self.decoder:
            x = layer(x, source, pairs)
        states: Tensor = self.decoder_norm(x)
        return states

    def begin(
        self, source: Tensor, source_cu_seqlens: Tensor, source_max_seqlen: int, beams: int
    ) -> "TransformerState":
        """The state of S * beams hypotheses; see `EncoderDecoder.begin`."""
        sequences = Sequences(source_cu_seqlens, source_max_seqlen, len(source))
        cache = BeamCache(self.config, len(source_cu_seqlens) - 1, beams, source.device, source.dtype)
        layers = [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]
        return TransformerState(cache, [layer.cross_attention.keep(source, sequences) for layer in layers])

    def advance(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The decoder's output (S * beams, H) at one more token; see `EncoderDecoder.advance`."""
        assert isinstance(state, TransformerState)
        state.cache.advance()
        positions = tokens.new_full(tokens.shape, state.cache.length - 1)
        x = self._embed(self.word, self.position, tokens, positions, tied=False)
        for number, (layer, source) in enumerate(zip(self.decoder, state.sources, strict=True)):
            assert isinstance(layer, DecoderLayer)
            x = layer.advance(x, state.cache, number, source)
        states: Tensor = self.decoder_norm(x)
        return states


class TransformerState(DecoderState):
    """Keys and values: of the hypotheses' tokens, and of each source once."""

    def __init__(self, cache: BeamCache, sources: list[PaddedSource]) -> None:
        self.cache, self.sources = cache, sources

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        self.cache.reorder(hypotheses)

    def keep(self, sentences: Tensor) -> None:
        """See `DecoderState.keep`."""
        self.cache.keep(sentences)
        self.sources = [source.keep(sentences) for source in self.sources]
