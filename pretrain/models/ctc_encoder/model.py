"""An encoder trained by connectionist temporal classification (Graves et al. 2006): the encoder of seq2seq or of the
transformer, and a softmax over tokens and the blank at each of its states.

The output matrix is the embedding (Press and Wolf 2017) where the vocabulary is joint, as in these families.
"""

import math

from torch import Generator, Tensor, nn, zeros

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.ctc_encoder.config import CtcEncoderConfig
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import select_tokens
from multihop.pretrain.models.layers.ctc import CtcTranslator
from multihop.pretrain.models.layers.encoder_decoder import embed_source
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.sinusoids import sinusoids
from multihop.pretrain.models.seq2seq.config import Seq2SeqConfig
from multihop.pretrain.models.seq2seq.layers import EncoderLayer as RecurrentLayer
from multihop.pretrain.models.seq2seq.time_steps import time_steps_of
from multihop.pretrain.models.transformer.layers import EPS
from multihop.pretrain.models.transformer.layers import EncoderLayer as TransformerLayer
from multihop.pretrain.packed_tokens import PackedTokens


class CtcEncoder(CtcTranslator):
    """The encoder and its output layer."""

    config: CtcEncoderConfig
    recurrent = True

    def __init__(self, config: CtcEncoderConfig, vocab_size: int, source_vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.source_word = None if source_vocab_size is None else nn.Embedding(source_vocab_size, config.hidden)
        self.dropout = Dropout(config.dropout)
        of_layers = config.layer_config
        self.layers = nn.ModuleList(
            RecurrentLayer(of_layers) if isinstance(of_layers, Seq2SeqConfig) else TransformerLayer(of_layers)
            for _ in range(config.layers)
        )
        is_transformer = config.encoder == "transformer"
        self.final_norm = nn.LayerNorm(config.hidden, eps=EPS) if is_transformer else nn.Identity()
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """As in the encoder's family: uniform within 0.1; or within sqrt(6 / (rows + columns)), embeddings normal."""
        if self.config.encoder != "transformer":
            nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
        elif name in ("word.weight", "source_word.weight"):
            nn.init.normal_(parameter, std=self.config.hidden**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The encoder's outputs (N, H), or (M, H), of packed sources; see `Model.encode`."""
        assert cache is None, "the encoder is bidirectional"
        return select_tokens(self._encode_source(packed, sparse_lookup_grad), token_indices)

    def hidden_states(self, packed: PackedTokens[Tensor]) -> list[Tensor]:
        """The states between the layers, (N, H) each, in the order of the tokens; see `Model.hidden_states`."""
        *between, last = super().hidden_states(packed)
        if self.config.encoder == "transformer":
            return [*between, last]
        order = time_steps_of(Sequences.of(packed)).inverse_order  # recurrent layers read time step after time step
        return [*(states.index_select(0, order) for states in between), last]

    def _encode_source(self, source: PackedTokens[Tensor], sparse_lookup_grad: bool) -> Tensor:
        sequences = Sequences.of(source)
        if self.config.encoder != "transformer":
            steps = time_steps_of(sequences)
            ids = source.input_ids.index_select(0, steps.order)
            x = embed_source(self.word, self.source_word, ids, sparse_lookup_grad)
            for layer in self.layers:
                x, _ = layer(self.dropout(x), steps)
            return self.dropout(x.index_select(0, steps.inverse_order))
        x = embed_source(self.word, self.source_word, source.input_ids, sparse_lookup_grad)
        fixed = sinusoids(self.config.max_positions, self.config.hidden, x.device, x.dtype)
        x = self.dropout(x * math.sqrt(self.config.hidden) + fixed.index_select(0, source.positions))
        for layer in self.layers:
            x = layer(x, sequences)
        hidden: Tensor = self.final_norm(x)
        return hidden
