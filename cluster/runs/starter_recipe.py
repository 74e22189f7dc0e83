"""Chooses a first recipe for a text and a machine, and writes it down with the reason for each choice.

Everything is a function of a few numbers: no file is read and no device is asked.
"""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt

from multihop.common.errors import UserError
from multihop.common.machine import datasheet_rate
from multihop.data_prep.config import Source

LEAST_BYTES, LEAST_DOCUMENTS = 100_000, 30
"""Of text. With less, a tokenizer has too few different words, or no document may be held out."""

_BYTES_A_TOKEN = 4.0
"""English has 3 to 5 bytes per token with vocabularies of 2,000 to 32,000 tokens."""
_TOKENS_A_PARAMETER = 20.0  # Hoffmann et al. 2022, table 3
_PASSES = {False: 10.0, True: 4.0}
"""The most passes over the text, by whether the model is causal."""
_BYTES_A_PARAMETER = 16  # Rajbhandari et al. 2020, section 3.1
_LEAST_STEPS, _STEPS, _LEAST_BATCH = 1_000, 10_000, 16
"""The fewest steps, and the steps below which the smallest batch is kept."""

_CORE_RATE = 25e9
"""Multiplications and additions a second that training does on a core: the demo's GPT-2 does 33e9 on a quiet one."""
_UNKNOWN_GPU_RATE = 50e12
_GPU_SHARE = 0.25
"""Share of a GPU's datasheet rate from a width of 768 on; narrower models reach less, in proportion."""
_MOST_CPU_RANKS = 16
_BYTES_A_RANK = 10**9
"""Memory of a rank's process on a CPU beside the model: torch, DeepSpeed, the batch."""

_SIZES = (
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
    """How much text there is."""

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
    """What trains: CPU cores, or GPUs of one kind."""

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
        """Floating-point operations a second that training a model of this width may be expected to do."""
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
    vocab_size: int
    seq_len: int
    batch: int
    """Sequences per step, over all ranks."""
    steps: int
    lr: float
    dropout: float
    heldout_fraction: float
    passes: float
    """How often each token is read."""
    hours: float
    """About how long training takes."""

    @property
    def tokens(self) -> int:
        """The tokens that training reads."""
        return self.steps * self.batch * self.seq_len

    @property
    def parameters(self) -> int:
        """Weights of the layers and the embeddings, without biases and norms."""
        return _layer_parameters(self.layers, self.hidden) + self.vocab_size * self.hidden


def choose(text: Text, machine: Machine, causal: bool, hours: float) -> Starter:
    """The recipe for a first run of at most about `hours`.

    Raises:
        UserError: There is too little text.
    """
    check_amount(text)
    most_passes = _PASSES[causal]
    readable = most_passes * text.tokens
    suitable = (size for size in reversed(_SIZES) if _suits(size, readable, machine, hours))
    _, _, layers, hidden, heads = size = next(suitable, _SIZES[0])
    operations = machine.rate(hidden) * hours * 3600
    vocab_size = choose_vocabulary(text, layers, hidden, causal)
    seq_len = _sequence_length(text, machine, hidden, causal)
    per_token = 6 * (_layer_parameters(layers, hidden) + _predicted(causal) * vocab_size * hidden)
    affordable = min(readable, operations / per_token)
    batch = _batch_size(affordable, seq_len, machine, causal)
    steps = _rounded(max(_LEAST_STEPS, affordable / (batch * seq_len)))
    passes = steps * batch * seq_len / text.tokens
    return Starter(
        causal=causal,
        preset=size[1] or "gpt2" if causal else size[0],
        layers=layers,
        hidden=hidden,
        heads=heads,
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
    """Refuse what no model can learn from.

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
            f"the texts have {text.documents} documents, and less than {LEAST_DOCUMENTS} leave too few to hold out; "
            "give each chapter or article a line of a .jsonl file, or write it as .txt with blank lines between"
        )
    if _characters_need(text) > vocabulary_limit(text):
        raise UserError(
            f"the texts have {text.characters:,} different characters, and {text.bytes:,} bytes support a vocabulary "
            f"of about {vocabulary_limit(text):,} tokens; add text"
        )


def vocabulary_limit(text: Text) -> int:
    """A vocabulary that can be trained on the text for certain.

    SentencePiece takes tokens from substrings that occur twice. Measured on 20 kB to 1 MB of English reviews and plays,
    it finds 7 to 14 for each square root of a byte.
    """
    return int(5 * sqrt(text.bytes)) // 100 * 100


def choose_vocabulary(text: Text, layers: int, hidden: int, causal: bool) -> int:
    """The largest usual vocabulary whose tokens are frequent enough to be learnt, and whose output layer is affordable.

    Tokens by rank r occur about tokens / (r ln V) times (Zipf): the rarest should occur 100 times (Gowda and May 2020).
    """
    affordable = 24 * layers * hidden / _predicted(causal)
    suitable = [size for size in _VOCABULARIES if 100 * size * log(size) <= text.tokens and size <= affordable]
    needed = _characters_need(text)
    wanted = max([*suitable[-1:], next((size for size in _VOCABULARIES if size >= needed), needed)])
    return min(wanted, vocabulary_limit(text))


def pick_field(lengths: dict[str, float], name: str) -> str:
    """The field that holds the text: the only one, the one that is clearly the longest, or `text`.

    Args:
        lengths: mean characters of each field with text, the longest first.
        name: of the source, for messages.

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


def recipe_yaml(starter: Starter, name: str, sources: Sequence[Source], text: Text, machine: Machine) -> str:
    """The recipe as YAML, each choice below a comment with its reason."""
    kind = "GPT-2" if starter.causal else "BERT"
    lines = [
        *_comment(
            f"A small {kind} as a first run, written by `multihop init` for about {_short(text.tokens)} tokens of text "
            f"and {machine}: about {_duration(starter.hours)} of training. Every choice has its reason; the keys that "
            "are not set have their defaults."
        ),
        f"name: {name}",
        "seed: 1",
        "data:",
        "  sources:",
        *(f"    - {_inline(source)}" for source in sources),
        *_comment(_why_held_out(starter, text), 2),
        f"  heldout_fraction: {starter.heldout_fraction:g}",
        "tokenizer:",
        *_comment(_why_vocabulary(starter, text), 2),
        f"  vocab_size: {starter.vocab_size}",
        f"  special_tokens: {'gpt2' if starter.causal else 'bert'}",
        "model:",
        *_comment(_why_size(starter, text, machine), 2),
        *_model_lines(starter),
        *_comment(
            f"Each token is read {starter.passes:.1f} times. Text that is repeated needs dropout, a single pass does "
            "not (Geiping and Goldstein 2022).",
            2,
        ),
        f"  dropout: {starter.dropout:g}",
    ]
    if not starter.causal:
        lines += [
            "objective:",
            *_comment(
                "Masked tokens alone: without next-sentence prediction a BERT is as good (Liu et al. 2019, table 2), "
                "and short documents can share a sequence.",
                2,
            ),
            "  name: mlm",
        ]
    lines += [
        "phases:",
        *_comment(_why_length(starter, text, machine), 2),
        f"  - seq_len: {starter.seq_len}",
        *_comment(_why_batch(starter), 4),
        f"    global_batch_size: {starter.batch}",
        *_comment(_why_steps(starter, text, machine), 4),
        f"    steps: {starter.steps}",
        *_comment(
            "The best rate of Adam falls with the width of the model (Yang et al. 2022): 2e-3 at a width of 128, as in "
            "this package's small BERTs, and in proportion. If the loss rises or jumps, halve it.",
            4,
        ),
        f"    lr: {_scientific(starter.lr)}",
        *_comment(
            "The second moment looks back 50 steps, as RoBERTa's, not 1,000: small batches leave the loss of the token "
            "frequencies sooner."
        ),
        "optimizer: {name: adamw, betas: [0.9, 0.98]}",
        "engine:",
        *_engine_lines(starter, machine),
        *_comment(
            "A checkpoint whenever the held-out loss is measured; rerun the same command to resume from the newest."
        ),
        f"checkpoint: {{save_interval: {_interval(starter)}, keep: 3}}",
        *_eval_lines(starter),
        *_comment("One training process for each " + ("GPU." if machine.gpus else "CPU core that has the memory.")),
        f"cluster: {{workers: {machine.ranks}}}",
    ]
    return "\n".join(lines) + "\n"


def summary(starter: Starter) -> str:
    """The choices on one line."""
    return (
        f"{'GPT-2' if starter.causal else 'BERT'} with {starter.layers} layers of width {starter.hidden} "
        f"({_short(starter.parameters)} parameters), vocabulary {starter.vocab_size:,}; {starter.steps:,} steps of "
        f"{starter.batch} x {starter.seq_len} tokens, about {_duration(starter.hours)}"
    )


def _suits(size: tuple[str, str, int, int, int], readable: float, machine: Machine, hours: float) -> bool:
    """Whether text, time and memory are enough for a size."""
    _, _, layers, hidden, _ = size
    parameters = _layer_parameters(layers, hidden)
    state = _BYTES_A_PARAMETER * (parameters + _VOCABULARIES[-1] * hidden)
    room = machine.gpu_memory if machine.gpus else machine.memory / machine.ranks
    return (
        _TOKENS_A_PARAMETER * parameters <= readable
        and 6 * _TOKENS_A_PARAMETER * parameters**2 <= machine.rate(hidden) * hours * 3600
        and 2 * state <= room
    )


def _layer_parameters(layers: int, hidden: int) -> int:
    return 12 * layers * hidden**2


def _predicted(causal: bool) -> float:
    """The share of tokens that pass through the output layer."""
    return 1.0 if causal else 0.15


def _characters_need(text: Text) -> int:
    """The smallest vocabulary that has every character, with some tokens of several."""
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
    while 2 * batch <= most and 2 * batch * seq_len * _STEPS <= tokens:
        batch *= 2
    return batch


def _rounded(steps: float) -> int:
    """Down to two digits."""
    unit = 10 ** (len(str(int(steps))) - 2)
    return int(steps) // unit * unit


def _interval(starter: Starter) -> int:
    return min(5_000, max(50, _rounded(starter.steps / 20)))


def _inline(source: Source) -> str:
    items = [f"path: {json.dumps(source.path, ensure_ascii=False)}"]
    items += [f"field: {json.dumps(source.field, ensure_ascii=False)}"] if "field" in source.model_fields_set else []
    items += [f"documents: {source.documents}"] if "documents" in source.model_fields_set else []
    return "{" + ", ".join(items) + "}"


def _model_lines(starter: Starter) -> list[str]:
    lines = [f"  preset: {starter.preset}"]
    if starter.causal and starter.hidden < 768:
        lines += [f"  layers: {starter.layers}", f"  hidden: {starter.hidden}", f"  heads: {starter.heads}"]
    if not starter.causal:
        lines += [
            *_comment(
                "Begin at the loss of a model that knows the frequency of each token, instead of learning it.", 2
            ),
            "  output_bias: unigram",
        ]
    if not starter.causal and starter.hidden <= 256:
        lines += [
            *_comment(
                "Begin with heads at the neighbouring tokens, and with embeddings from co-occurrences: small masked "
                "models learn from far fewer tokens with them.",
                2,
            ),
            "  attention_init: neighbours",
            "  word_init: cooccurrences",
        ]
    return lines


def _engine_lines(starter: Starter, machine: Machine) -> list[str]:
    interval = _interval(starter)
    if machine.gpus:
        precision = "bf16" if machine.has_bf16 else "fp16"
        head = [
            *_comment("Half the bytes of fp32, on tensor cores; the optimizer updates fp32 weights.", 2),
            f"  precision: {precision}",
            *_comment("As many sequences per forward pass as fit, measured at the first start.", 2),
            "  micro_batch_size: auto",
        ]
    else:
        head = [
            *_comment(
                "Sequences per forward pass, as in the demo. More take more memory, and train no faster on a CPU.", 2
            ),
            "  micro_batch_size: 8",
        ]
    return [
        *head,
        *_comment("Rows of metrics, and held-out losses: about 20 of these in all.", 2),
        f"  log_interval: {max(1, interval // 10)}",
        f"  eval_interval: {interval}",
        "  heldout_samples: 256",
    ]


def _eval_lines(starter: Starter) -> list[str]:
    if starter.causal:
        return [
            *_comment(
                "The perplexity on held-out documents needs no labels. Add your own labelled files to judge what the "
                "model is for."
            ),
            "eval: {tasks: [heldout-perplexity]}",
        ]
    return [
        *_comment(
            "Without labelled data a masked model is judged by its held-out loss alone. Add your own labelled files: "
            "tasks: [complaints.yaml]"
        ),
        "eval: {tasks: []}",
    ]


def _why_held_out(starter: Starter, text: Text) -> str:
    return (
        f"Documents that are never trained on, chosen by a hash of each: about {starter.heldout_fraction:.0%} of "
        f"{text.documents:,}. Their loss says whether the model learns or learns by heart."
    )


def _why_vocabulary(starter: Starter, text: Text) -> str:
    return (
        f"Of the usual sizes the largest whose rarest tokens occur about 100 times in {_short(text.tokens)} tokens "
        "(Gowda and May 2020), and whose output layer takes at most twice the work of all other layers; at least one "
        f"for each of the {text.characters:,} characters."
    )


def _why_size(starter: Starter, text: Text, machine: Machine) -> str:
    layers = _layer_parameters(starter.layers, starter.hidden)
    reason = (
        f"{starter.layers} layers of width {starter.hidden}, {_short(layers)} parameters without embeddings: the "
        f"largest of the published sizes that this text and {machine} can give 20 tokens a parameter (Hoffmann et al. "
        "2022)"
    )
    is_smallest = (starter.layers, starter.hidden) == _SIZES[0][2:4]
    return f"{reason}; there is none below it." if is_smallest else f"{reason}."


def _why_length(starter: Starter, text: Text, machine: Machine) -> str:
    mean = text.tokens / text.documents
    if starter.seq_len >= mean:
        return f"A document has about {mean:,.0f} tokens: longer sequences would join more unrelated documents."
    if starter.seq_len == 128:
        return (
            f"A document has about {mean:,.0f} tokens. 128 at a time teach words and syntax at little cost: BERT spent "
            "nine of ten steps at this length (Devlin et al. 2018, A.2)."
        )
    return f"A document has about {mean:,.0f} tokens; this is as long as the family was published with, at this width."


def _why_batch(starter: Starter) -> str:
    return (
        f"{starter.batch * starter.seq_len:,} tokens a step. Up to {_STEPS:,} steps, more steps are worth more than "
        "larger batches: the batch size that pays grows only as the loss falls (McCandlish et al. 2018)."
    )


def _why_steps(starter: Starter, text: Text, machine: Machine) -> str:
    most = _PASSES[starter.causal]
    read = f"{_short(starter.tokens)} tokens, {starter.passes:.1f} passes over the text"
    reads_all = 0.85 * most < starter.passes <= most
    if starter.steps == _LEAST_STEPS and not reads_all:
        return f"{read}: with fewer steps a model learns little but the frequency of each token."
    if reads_all:
        why = (
            "up to four passes are nearly as good as new text (Muennighoff et al. 2023)"
            if starter.causal
            else "each pass has other masks, and BERT made 40 of them (Devlin et al. 2018, A.2), each worth less"
        )
        return f"{read}: {why}."
    return f"{read}: as many as {machine} can do in about {_duration(starter.hours)}, the limit set by --hours."


def _comment(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        110 - indent,
        initial_indent=" " * indent + "# ",
        subsequent_indent=" " * indent + "# ",
        break_long_words=False,
    )


def _scientific(value: float) -> str:
    """With a point and a signed exponent: YAML 1.1 reads 2e-3 as a string."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _short(count: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{float(f'{count:.2g}'):,.0f}"


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.2g} hours"
    minutes = max(1, round(hours * 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"
