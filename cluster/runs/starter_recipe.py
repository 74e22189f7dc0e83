"""Chooses a first recipe for a text and a machine, as a function of a few numbers; it reads no file and queries no
device. `starter_yaml.py` writes the recipe."""

from dataclasses import dataclass
from math import ceil, log, sqrt

from multihop.common.errors import UserError
from multihop.common.gpus import datasheet_rate

LEAST_BYTES, LEAST_DOCUMENTS = 100_000, 30
"""The least text: with less, a tokenizer has too few different words, or no document may be held out."""

_BYTES_A_TOKEN = 4.0
"""English has 3 to 5 bytes per token with vocabularies of 2,000 to 32,000 tokens."""
_TOKENS_A_PARAMETER = 20.0  # Hoffmann et al. 2022, table 3
PASSES = {False: 10.0, True: 4.0}
"""The most passes over the text, by whether the model is causal."""
_BYTES_A_PARAMETER = 16  # Rajbhandari et al. 2020, section 3.1
LEAST_STEPS, STEPS, _LEAST_BATCH = 1_000, 10_000, 16
"""The fewest steps, and the steps below which the smallest batch is kept."""

_CORE_RATE = 25e9
"""Multiplications and additions a second that training does on a core: the demo's GPT-2 does 33e9 on a quiet one."""
_UNKNOWN_GPU_RATE = 50e12
_GPU_SHARE = 0.25
"""Share of a GPU's datasheet rate from a width of 768 on; narrower models reach less, in proportion."""
_MOST_CPU_RANKS = 16
_BYTES_A_RANK = 10**9
"""Memory of a rank's process on a CPU beside the model: torch, DeepSpeed, the batch."""

SIZES = (
    # preset of BERT, preset of GPT-2, layers, hidden, heads: Turc et al. 2019, table 1; Devlin et al. 2018, section 3;
    # Radford et al. 2019, table 2.
    ("bert-tiny", "", 2, 128, 2),
    ("bert-mini", "", 4, 256, 4),
    ("bert-small", "", 4, 512, 8),
    ("bert-medium", "", 8, 512, 8),
    ("bert-base", "gpt2", 12, 768, 12),
    ("bert-large", "gpt2-medium", 24, 1024, 16),
)
_VOCABULARIES = (1_000, 2_000, 4_000, 8_000, 16_000, 30_000)


@dataclass(frozen=True)
class Text:
    """The amount of text."""

    bytes: int
    """UTF-8."""
    documents: int
    characters: int
    """The different characters that make up 99.95 % of the text, which a tokenizer keeps."""

    @property
    def tokens(self) -> float:
        """About how many tokens a tokenizer makes of it."""
        return self.bytes / _BYTES_A_TOKEN


@dataclass(frozen=True)
class Machine:
    """The hardware that trains: CPU cores, or GPUs of one kind."""

    cores: int
    memory: int
    """Free bytes of the host."""
    gpus: int = 0
    gpu_name: str = ""
    gpu_memory: int = 0
    """Bytes of one GPU."""
    has_bf16: bool = False

    @property
    def ranks(self) -> int:
        """Training processes: one per GPU, or one per core where memory allows it."""
        return self.gpus or max(1, min(self.cores, _MOST_CPU_RANKS, self.memory // (2 * _BYTES_A_RANK)))

    def rate(self, hidden: int) -> float:
        """Return the floating-point operations a second that training a model of this width can be expected to do."""
        if not self.gpus:
            return self.ranks * _CORE_RATE
        share = _GPU_SHARE * min(1.0, hidden / 768)
        return self.gpus * share * (datasheet_rate(self.gpu_name) or _UNKNOWN_GPU_RATE)

    def __str__(self) -> str:
        if self.gpus:
            return f"{self.gpus} GPU{'s' * (self.gpus > 1)} ({self.gpu_name})"
        return f"{self.cores} CPU core{'s' * (self.cores > 1)}"


@dataclass(frozen=True)
class Starter:
    """The choices."""

    causal: bool
    preset: str
    layers: int
    hidden: int
    heads: int
    special_tokens: str
    vocab_size: int
    seq_len: int
    batch: int
    """Sequences per step, over all ranks."""
    steps: int
    lr: float
    dropout: float
    heldout_fraction: float
    passes: float
    """Passes over the text."""
    hours: float
    """Estimated duration of the training, in hours."""

    @property
    def tokens(self) -> int:
        """The tokens that training reads."""
        return self.steps * self.batch * self.seq_len

    @property
    def parameters(self) -> int:
        """Weights of the layers and the embeddings, without biases and norms."""
        return layer_parameters(self.layers, self.hidden) + self.vocab_size * self.hidden


def choose(text: Text, machine: Machine, causal: bool, hours: float) -> Starter:
    """Return the recipe for a first run of at most about `hours`.

    Raises:
        UserError: There is too little text.
    """
    check_amount(text)
    most_passes = PASSES[causal]
    readable = most_passes * text.tokens
    suitable = (size for size in reversed(SIZES) if _suits(size, readable, machine, hours))
    _, _, layers, hidden, heads = size = next(suitable, SIZES[0])
    operations = machine.rate(hidden) * hours * 3600
    vocab_size = choose_vocabulary(text, layers, hidden, causal)
    seq_len = _sequence_length(text, machine, hidden, causal)
    per_token = 6 * (layer_parameters(layers, hidden) + _predicted(causal) * vocab_size * hidden)
    affordable = min(readable, operations / per_token)
    batch = _batch_size(affordable, seq_len, machine, causal)
    steps = round_down(max(LEAST_STEPS, affordable / (batch * seq_len)))
    passes = steps * batch * seq_len / text.tokens
    return Starter(
        causal=causal,
        preset=size[1] or "gpt2" if causal else size[0],
        layers=layers,
        hidden=hidden,
        heads=heads,
        special_tokens="gpt2" if causal else "bert",
        vocab_size=vocab_size,
        seq_len=seq_len,
        batch=batch,
        steps=steps,
        lr=float(f"{2e-3 * 128 / hidden:.1e}"),
        dropout=0.1 if passes > 1.5 else 0.0,
        heldout_fraction=min(0.2, max(0.01, ceil(2_000 / text.documents) / 100)),
        passes=passes,
        hours=steps * batch * seq_len * per_token / machine.rate(hidden) / 3600,
    )


def check_amount(text: Text) -> None:
    """Refuse texts that are too short or have too many characters for a tokenizer and a model.

    Raises:
        UserError: There is too little text, or its characters alone need a larger vocabulary than it supports.
    """
    if text.bytes < LEAST_BYTES:
        raise UserError(
            f"the texts have about {text.bytes:,} bytes, and a tokenizer and a model learn nothing from less than "
            f"{LEAST_BYTES:,} (about 20,000 words); add text, or start from a published model with model.init_from"
        )
    if text.documents < LEAST_DOCUMENTS:
        raise UserError(
            f"the texts have {text.documents} document{'s' * (text.documents != 1)}, and less than {LEAST_DOCUMENTS} "
            "leave too few to hold out; "
            "give each chapter or article a line of a .jsonl file, or write it as .txt with blank lines between"
        )
    if _characters_need(text) > vocabulary_limit(text):
        raise UserError(
            f"the texts have {text.characters:,} different characters, but {text.bytes:,} bytes support a vocabulary "
            f"of about {vocabulary_limit(text):,} tokens; add text"
        )


def vocabulary_limit(text: Text) -> int:
    """Return a vocabulary that can be trained on the text for certain.

    SentencePiece takes tokens from substrings that occur twice. Measured on 20 kB to 1 MB of English reviews and plays,
    it finds 7 to 14 for each square root of a byte.
    """
    return int(5 * sqrt(text.bytes)) // 100 * 100


def choose_vocabulary(text: Text, layers: int, hidden: int, causal: bool) -> int:
    """Return the largest usual vocabulary whose tokens are frequent enough to be learned, and whose output layer is
    affordable.

    Tokens by rank r occur about tokens / (r ln V) times (Zipf): the rarest should occur 100 times (Gowda and May 2020).
    """
    affordable = 24 * layers * hidden / _predicted(causal)
    suitable = [size for size in _VOCABULARIES if 100 * size * log(size) <= text.tokens and size <= affordable]
    needed = _characters_need(text)
    wanted = max([*suitable[-1:], next((size for size in _VOCABULARIES if size >= needed), needed)])
    return min(wanted, vocabulary_limit(text))


def pick_field(lengths: dict[str, float], name: str) -> str:
    """Return the field that holds the text: the only one, the one that is clearly the longest, or `text`.

    Args:
        lengths: mean characters of each field with text, the longest first.
        name: name of the source, for messages.

    Raises:
        UserError: There is none, or several could be it.
    """
    fields = list(lengths)
    if not fields:
        raise UserError(
            f"{name} has no field with text in its first rows; name it with --field, or correct the files: each row "
            "needs a field at the top level whose value is a string"
        )
    longest = fields[0]
    if len(fields) == 1 or longest == "text" or lengths[longest] >= 4 * lengths[fields[1]]:
        return longest
    described = ", ".join(f"{field} (on average {lengths[field]:.0f} characters)" for field in fields[:5])
    raise UserError(f"{name} has several fields that could be the text: {described}; choose one with --field {longest}")


def _suits(size: tuple[str, str, int, int, int], readable: float, machine: Machine, hours: float) -> bool:
    """Return whether text, time and memory are enough for a size."""
    _, _, layers, hidden, _ = size
    parameters = layer_parameters(layers, hidden)
    state = _BYTES_A_PARAMETER * (parameters + _VOCABULARIES[-1] * hidden)
    room = machine.gpu_memory if machine.gpus else machine.memory / machine.ranks
    return (
        _TOKENS_A_PARAMETER * parameters <= readable
        and 6 * _TOKENS_A_PARAMETER * parameters**2 <= machine.rate(hidden) * hours * 3600
        and 2 * state <= room
    )


def layer_parameters(layers: int, hidden: int) -> int:
    return 12 * layers * hidden**2


def _predicted(causal: bool) -> float:
    """Return the share of tokens that pass through the output layer."""
    return 1.0 if causal else 0.15


def _characters_need(text: Text) -> int:
    """Return the smallest vocabulary that has every character, with some tokens of several."""
    return ceil((1.25 * text.characters + 100) / 100) * 100


def _sequence_length(text: Text, machine: Machine, hidden: int, causal: bool) -> int:
    longest = 128 if not machine.gpus or hidden < 512 else 1024 if causal and hidden >= 768 else 512
    length = 64
    while length < longest and length < text.tokens / text.documents:
        length *= 2
    return length


def _batch_size(tokens: float, seq_len: int, machine: Machine, causal: bool) -> int:
    most = (512 * 1024 if causal else 256 * 512) // seq_len
    batch = max(_LEAST_BATCH, 2 ** ceil(log(machine.ranks, 2)))
    while 2 * batch <= most and 2 * batch * seq_len * STEPS <= tokens:
        batch *= 2
    return batch


def round_down(steps: float) -> int:
    """Down to two digits."""
    unit = 10 ** (len(str(int(steps))) - 2)
    return int(steps) // unit * unit
