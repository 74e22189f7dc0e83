"""Writes a starter recipe as YAML, with the reason for each choice as a comment."""

import json
import textwrap
from collections.abc import Sequence

import yaml

from multihop.cluster.runs.starter_recipe import (
    LEAST_STEPS,
    PASSES,
    SIZES,
    STEPS,
    Machine,
    Starter,
    Text,
    layer_parameters,
    round_down,
)
from multihop.data_prep.config import Source


def recipe_yaml(starter: Starter, name: str, sources: Sequence[Source], text: Text, machine: Machine) -> str:
    """Return the recipe as YAML, each choice below a comment with its reason."""
    kind = "GPT-2" if starter.causal else "BERT"
    lines = [
        *_comment(
            f"A small {kind} as a first run, written by `multihop init` for about {_short(text.tokens)} tokens of text "
            f"and {machine}: about {_duration(starter.hours)} of training. Every choice has its reason; the keys that "
            "are not set have their defaults."
        ),
        yaml.safe_dump({"name": name}).strip(),  # quoted if it looks like a number or a boolean
        "seed: 1",
        "data:",
        "  sources:",
        *(f"    - {_inline(source)}" for source in sources),
        *_comment(_why_held_out(starter, text), 2),
        f"  heldout_fraction: {starter.heldout_fraction:g}",
        "tokenizer:",
        *_comment(_why_vocabulary(starter, text), 2),
        f"  vocab_size: {starter.vocab_size}",
        f"  special_tokens: {starter.special_tokens}",
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
        *_comment(_why_length(starter, text), 2),
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
    """Return the choices on one line."""
    return (
        f"{'GPT-2' if starter.causal else 'BERT'} with {starter.layers} layers of width {starter.hidden} "
        f"({_short(starter.parameters)} parameters without positions and heads), vocabulary {starter.vocab_size:,}; "
        f"{starter.steps:,} steps of {starter.batch} x {starter.seq_len} tokens, about {_duration(starter.hours)}"
    )


def _interval(starter: Starter) -> int:
    return min(5_000, max(50, round_down(starter.steps / 20)))


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
                "Begin with heads at the neighboring tokens, and with embeddings from co-occurrences: small masked "
                "models learn from far fewer tokens with them.",
                2,
            ),
            "  attention_init: neighbors",
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
            *_comment("As many sequences per forward pass as fit, planned at the first start.", 2),
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
                "The perplexity on held-out documents needs no labels. Add your own labeled files to judge what the "
                "model is for."
            ),
            "eval: {tasks: [heldout-perplexity]}",
        ]
    return [
        *_comment(
            "Without labeled data a masked model is judged by its held-out loss alone. Add your own labeled files: "
            "tasks: [complaints.yaml]"
        ),
        "eval: {tasks: []}",
    ]


def _why_held_out(starter: Starter, text: Text) -> str:
    return (
        f"Documents that are never trained on, chosen by a hash of each: about {starter.heldout_fraction:.0%} of "
        f"{text.documents:,}. Their loss says whether the model generalizes or memorizes."
    )


def _why_vocabulary(starter: Starter, text: Text) -> str:
    return (
        f"Of the usual sizes the largest whose rarest tokens occur about 100 times in {_short(text.tokens)} tokens "
        "(Gowda and May 2020), and whose output layer takes at most twice the work of all other layers; at least one "
        f"for each of the {text.characters:,} characters."
    )


def _why_size(starter: Starter, text: Text, machine: Machine) -> str:
    layers = layer_parameters(starter.layers, starter.hidden)
    reason = (
        f"{starter.layers} layers of width {starter.hidden}, {_short(layers)} parameters without embeddings: the "
        f"largest of the published sizes that this text and {machine} can give 20 tokens a parameter (Hoffmann et al. "
        "2022)"
    )
    is_smallest = (starter.layers, starter.hidden) == SIZES[0][2:4]
    return f"{reason}; there is none below it." if is_smallest else f"{reason}."


def _why_length(starter: Starter, text: Text) -> str:
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
        f"{starter.batch * starter.seq_len:,} tokens a step. Up to {STEPS:,} steps, more steps are worth more than "
        "larger batches: the batch size that pays grows only as the loss falls (McCandlish et al. 2018)."
    )


def _why_steps(starter: Starter, text: Text, machine: Machine) -> str:
    most = PASSES[starter.causal]
    read = f"{_short(starter.tokens)} tokens, {starter.passes:.1f} passes over the text"
    reads_all = 0.85 * most < starter.passes <= most
    if starter.steps == LEAST_STEPS and not reads_all:
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
    """Return a float as YAML reads it: 2e-3, without a point, is a string in YAML 1.1."""
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
