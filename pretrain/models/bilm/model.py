"""The bidirectional language model: a forward and a backward stack of LSTMs over the same embeddings.

TagLM (Peters et al. 2017) uses the states of its last layer, ELMo (Peters et al. 2018) a mix of all. After the authors'
code, bilm-tf.
"""

from torch import Generator, Tensor, cat, nn, no_grad, zeros
from torch.nn import functional as F

from multihop.common.errors import UserError
from multihop.pretrain.models.bilm.characters import CharacterEncoder
from multihop.pretrain.models.bilm.config import BilmConfig
from multihop.pretrain.models.bilm.lstm import BilmLayer, State
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed, select_tokens
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps, time_steps_of
from multihop.pretrain.packed_tokens import PackedTokens


class Bilm(Model):
    """Both language models. The token embedding is the output matrix of both (Press and Wolf 2017).

    Of a model that reads characters, `word` has their embeddings, `input_ids` are int64 (N, max_characters), and there
    is no output matrix: the published weights of ELMo have none.
    """

    config: BilmConfig

    def __init__(self, config: BilmConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.embedding_width)
        self.characters: CharacterEncoder | None = None
        if config.characters is not None:
            self.characters = CharacterEncoder(config.characters, config.hidden // 2)
        self.dropout = Dropout(config.dropout)
        # The embedding is no output of an LSTM, and is not added to the first one's.
        self.layers = nn.ModuleList(
            BilmLayer(config, config.skip_connections and layer > 0) for layer in range(config.layers)
        )
        if config.characters is None:
            self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Glorot's uniform distribution, as of TensorFlow's LSTM; the token embedding, which is the output matrix, is
        normal with a variance of 1 / P."""
        if name == "word.weight":
            nn.init.normal_(parameter, std=self.config.embedding_width**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
        states: list[list[State]] | None = None,
    ) -> Tensor:
        """The last layer's states (N, H), or (M, H), of packed sequences: the forward model's, then the backward
        model's; see `Model.encode`.

        Args:
            states: for each layer those of its two directions before each sequence, for the backward model after it;
                None: zeros.
        """
        assert packed.token_type_ids is None, "a biLM has no token types"
        assert cache is None, "a biLM does not generate"
        x, steps = self._embed(packed, sparse_lookup_grad), time_steps_of(Sequences.of(packed))
        for number, layer in enumerate(self.layers):
            x = layer(self.dropout(x), steps, None if states is None else states[number])
        return select_tokens(x, token_indices)

    def read(
        self, packed: PackedTokens[Tensor], states: list[list[State]] | None = None
    ) -> tuple[list[Tensor], list[list[State]]]:
        """The hidden states, as `hidden_states`, from given states of the LSTMs before each sequence.

        Args:
            states: for each layer those of its two directions, as this method returns them after other sequences;
                None: zeros.

        Returns:
            The embeddings and the states of each layer, (N, H); the LSTMs' states after each sequence.
        """
        steps: TimeSteps = time_steps_of(Sequences.of(packed))
        hidden, after = [self._embed(packed, False)], []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, BilmLayer)
            x, last = layer.run(hidden[-1], steps, [None, None] if states is None else states[number])
            hidden.append(x)
            after.append(last)
        return hidden, after

    def _embed(self, packed: PackedTokens[Tensor], sparse_lookup_grad: bool) -> Tensor:
        """The embedding of each token, once for each direction: (N, H)."""
        x = embed(self.word, packed.input_ids, sparse_lookup_grad)
        if self.characters is not None:
            x = self.characters(x)
        return cat([x, x], 1)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of the next token by the forward model alone, of hidden states (M, H).

        Raises:
            UserError: The model reads characters.
        """
        if self.characters is not None:
            raise UserError("a biLM that reads characters has no output matrix, and predicts no words")
        return F.linear(hidden.chunk(2, 1)[0], self.word.weight, self.word_bias)

    def forward(
        self,
        packed: PackedTokens[Tensor],
        next_positions: Tensor,
        context: PackedTokens[Tensor] | None = None,
        preceding: Tensor | None = None,
        following: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of both directions.

        Args:
            next_positions: int64 (M,), the positions of tokens that have a next one in their sequence: the forward
                model predicts that from it, and the backward model it from that.
            context: texts around the sequences, which are read first, without a gradient and dropout.
            preceding: int64 (S,), the text of `context` before each sequence, from 1; 0: none.
            following: the same of those after each sequence.
        """
        states = None
        if context is not None:
            assert preceding is not None and following is not None
            with no_grad():
                read = self.read(context)[1]
            states = [[_carried(there, preceding), _carried(back, following)] for there, back in read]
        hidden = self.encode(packed, sparse_lookup_grad=True, states=states)
        forward_states, backward_states = self.dropout(hidden).chunk(2, 1)
        after = next_positions + 1
        hidden = cat([forward_states.index_select(0, next_positions), backward_states.index_select(0, after)])
        labels = cat([packed.input_ids.index_select(0, after), packed.input_ids.index_select(0, next_positions)])
        return {"bilm": fused_linear_cross_entropy(hidden, self.word.weight, self.word_bias, labels)}


def _carried(state: State, rows: Tensor) -> State:
    """The states at `rows`, from 1; zeros at 0."""
    r, c = (F.pad(each, (0, 0, 1, 0)).index_select(0, rows) for each in state)
    return r, c
