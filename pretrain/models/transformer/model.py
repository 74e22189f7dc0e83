"""The Transformer (Vaswani et al. 2017): an encoder and a decoder of attention and feed-forward layers."""

import math

from torch import Generator, Tensor, nn, zeros

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.cross_attention import PaddedSource, Pairs
from multihop.pretrain.models.layers.encoder_decoder import DecoderState, EncoderDecoder, embed_source
from multihop.pretrain.models.layers.sinusoids import sinusoids
from multihop.pretrain.models.transformer.beam_cache import BeamCache
from multihop.pretrain.models.transformer.config import TransformerConfig
from multihop.pretrain.models.transformer.layers import EPS, DecoderLayer, EncoderLayer
from multihop.pretrain.packed_tokens import PackedTokens


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
    def last_cross_attention(self) -> nn.Module:
        """The cross-attention of the last layer; see `EncoderDecoder.last_cross_attention`."""
        last = self.decoder[-1]
        assert isinstance(last, DecoderLayer)
        return last.cross_attention

    def encode_source(self, source: PackedTokens[Tensor]) -> Tensor:
        """The encoder's outputs (Ns, H); see `EncoderDecoder.encode_source`."""
        return self._encode_source(source, Sequences.of(source))

    def _encode_source(
        self, source: PackedTokens[Tensor], sequences: Sequences, sparse_lookup_grad: bool = False
    ) -> Tensor:
        x = embed_source(self.word, self.source_word, source.input_ids, sparse_lookup_grad)
        x = self._add_positions(x, self.source_position, source.positions)
        for layer in self.encoder:
            x = layer(x, sequences)
        states: Tensor = self.encoder_norm(x)
        return states

    def _add_positions(self, embedded: Tensor, learned: nn.Embedding | None, positions: Tensor) -> Tensor:
        """The sum of the embeddings, scaled by sqrt(H), and the positions (section 3.4)."""
        x = embedded * math.sqrt(self.config.hidden)
        if learned is not None:
            return self.dropout(x + learned(positions))
        fixed = sinusoids(self.config.max_positions, self.config.hidden, x.device, x.dtype)
        return self.dropout(x + fixed.index_select(0, positions))

    def decode_targets(
        self, source: PackedTokens[Tensor], target: PackedTokens[Tensor], sparse_lookup_grad: bool = False
    ) -> Tensor:
        """The decoder's outputs (Nt, H); see `EncoderDecoder.decode_targets`."""
        sources = Sequences.of(source)
        pairs = Pairs(Sequences.of(target), sources)
        encoded = self._encode_source(source, sources, sparse_lookup_grad)
        x = embed(self.word, target.input_ids, sparse_lookup_grad)
        x = self._add_positions(x, self.position, target.positions)
        for layer in self.decoder:
            x = layer(x, encoded, pairs)
        states: Tensor = self.decoder_norm(x)
        return states

    def init_decoder_state(
        self, encoded: Tensor, source: PackedTokens[Tensor], beams: int
    ) -> "TransformerDecoderState":
        """The state of S * beams hypotheses; see `EncoderDecoder.init_decoder_state`."""
        sequences = Sequences.of(source)
        cache = BeamCache(self.config, len(source.cu_seqlens) - 1, beams, encoded.device, encoded.dtype)
        layers = [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]
        return TransformerDecoderState(
            cache, [layer.cross_attention.project_source(encoded, sequences) for layer in layers]
        )

    def decode_step(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """The decoder's outputs (S * beams, H) for one more token; see `EncoderDecoder.decode_step`."""
        assert isinstance(state, TransformerDecoderState)
        state.cache.advance()
        positions = tokens.new_full(tokens.shape, state.cache.length - 1)
        x = self._add_positions(embed(self.word, tokens, sparse_lookup_grad=False), self.position, positions)
        for number, (layer, source) in enumerate(zip(self.decoder, state.sources, strict=True)):
            assert isinstance(layer, DecoderLayer)
            x = layer.decode_step(x, state.cache, number, source)
        states: Tensor = self.decoder_norm(x)
        return states


class TransformerDecoderState(DecoderState):
    """The keys and values of the hypotheses' tokens, and of each source, stored once."""

    def __init__(self, cache: BeamCache, sources: list[PaddedSource]) -> None:
        self.cache, self.sources = cache, sources

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        self.cache.reorder(hypotheses)

    def select_sentences(self, sentences: Tensor) -> None:
        """See `DecoderState.select_sentences`."""
        self.cache.select_sentences(sentences)
        self.sources = [source.select_(sentences) for source in self.sources]
