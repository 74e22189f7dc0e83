"""The commands `fill-mask`, `generate`, `translate` and `embed`: a trained model on texts that a user gives."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from multihop.cluster.cli.options import AsJson, ModelPath, Runs, Step, locate_run
from multihop.common.errors import UserError
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from multihop.eval.inference.beam_search import Search
    from multihop.eval.inference.embed import EmbedPooling
    from multihop.eval.inference.generate import Sampling
    from multihop.eval.inference.trained_model import TrainedModel

inference_commands = typer.Typer()
_TEXTS_AT_ONCE = 64
_LINES_AT_ONCE = 512
"""Lines that are translated at once, so that batches of similar length can be made."""


@inference_commands.command("fill-mask")
def fill_mask(
    run: ModelPath,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT…", help='For example "The river [MASK] stone."')],
    runs: Runs = Path("runs"),
    step: Step = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Number of tokens to show for each mask.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Fill in the mask tokens of texts with a masked model."""
    location = locate_run(run, runs)
    show_filled(location, step, texts, top_k, as_json)


@inference_commands.command()
def generate(
    run: ModelPath,
    prompts: Annotated[list[str], typer.Option("--prompt", metavar="TEXT", help="Text to continue. Repeatable.")],
    runs: Runs = Path("runs"),
    step: Step = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Sample; logits are divided by this.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 1,
) -> None:
    """Continue prompts with a causal model. Greedy, unless a sampling option is given."""
    location = locate_run(run, runs)
    from multihop.eval.inference.generate import Sampling

    if temperature is None and top_k is None and top_p is None:
        sampling = None
    else:
        sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed)
    show_generated(location, step, prompts, max_tokens, sampling)


@inference_commands.command()
def translate(
    run: ModelPath,
    runs: Runs = Path("runs"),
    step: Step = None,
    beams: Annotated[int, typer.Option(min=1, help="Hypotheses of the beam search; 1: greedy.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above 0: prefers longer translations.")] = 0.6,
    attention_maps: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for pictures N.png of what the translation of line N attends to."),
    ] = None,
) -> None:
    """Translate or complete the lines of standard input. Prints one line for each."""
    location = locate_run(run, runs)
    from multihop.eval.inference.beam_search import Search

    show_translated(location, step, Search(beams, length_penalty), attention_maps)


@inference_commands.command()
def embed(
    run: ModelPath,
    runs: Runs = Path("runs"),
    step: Step = None,
    pooling: Annotated[
        Literal["mean", "family"],
        typer.Option(help="mean: over all tokens; family: as in fine-tuning, pooler, first or last token, or mean."),
    ] = "mean",
) -> None:
    """Embed the lines of standard input. Prints one JSON object per line."""
    location = locate_run(run, runs)
    show_embedded(location, step, pooling)


def show_filled(location: str, step: int | None, texts: Sequence[str], top_k: int, as_json: bool) -> None:
    """Print the likeliest tokens for the masks of each text."""
    from multihop.eval.inference.fill import fill

    trained = _load(location, step)
    for text, masks in zip(texts, fill(trained, texts, top_k), strict=True):
        if as_json:
            row = {"text": text, "masks": [[asdict(each) for each in mask] for mask in masks]}
            print(json.dumps(row, ensure_ascii=False))
            continue
        print(safe_text(text))
        for number, mask in enumerate(masks, start=1):
            if len(masks) > 1:
                print(f"mask {number}")
            for each in mask:
                print(f"{each.probability:8.1%}  {safe_text(each.token.strip())}")


def show_generated(
    location: str, step: int | None, prompts: Sequence[str], max_tokens: int, sampling: "Sampling | None"
) -> None:
    """Print each prompt with its continuation; one of a single prompt as it is generated."""
    from multihop.eval.inference.generate import generate, stream

    trained = _load(location, step)
    if len(prompts) > 1:
        made = generate(trained, prompts, max_tokens, sampling)
        print("\n\n".join(safe_text(prompt + text) for prompt, text in zip(prompts, made, strict=True)))
        return
    parts = stream(trained, prompts[0], max_tokens, sampling)
    first = next(parts)  # a prompt that is refused must not be printed
    print(safe_text(prompts[0] + first), end="", flush=True)
    for part in parts:
        print(safe_text(part), end="", flush=True)
    print()


def show_translated(location: str, step: int | None, search: "Search", attention_maps: Path | None) -> None:
    """Print the translation of each line of standard input, in order, as soon as some are done.

    Args:
        attention_maps: folder for a picture of what the translation of line N attends to, N.png.
    """
    from multihop.cluster.console import progress_line
    from multihop.common.files import make_folder, write_atomically
    from multihop.eval.inference.attention_map import cross_attention_module
    from multihop.eval.inference.translate import check_translates, translate
    from multihop.eval.report.attention_picture import draw_map
    from multihop.eval.report.plot_style import as_png

    trained, truncated, done = _load(location, step), 0, 0
    # An unsuitable model is refused before any input is read.
    check_translates(trained)
    if attention_maps is not None:
        cross_attention_module(trained)
        make_folder(attention_maps)
    lines = _lines_of_file()
    with progress_line("translate") as line:
        for texts in _batches(_input_lines(), _LINES_AT_ONCE):
            for result in translate(trained, texts, search):
                done += 1
                truncated += result.is_truncated
                print(" ".join(result.text.splitlines()))  # byte tokens can decode to line breaks
                if attention_maps is not None and result.tokens:
                    write_atomically(attention_maps / f"{done}.png", as_png(draw_map(trained, result)))
            sys.stdout.flush()
            line.update(done, lines)
    _warn_about_truncation(trained, truncated)


def show_embedded(location: str, step: int | None, pooling: "EmbedPooling") -> None:
    """Print a line of JSON for each line of standard input."""
    from multihop.eval.inference.embed import NoTokensError, embed

    trained, truncated, done = _load(location, step), 0, 0
    for texts in _batches(_input_lines(), _TEXTS_AT_ONCE):
        try:
            vectors = embed(trained, texts, pooling)
        except NoTokensError as error:
            line, text = done + error.number, texts[error.number - 1]
            raise UserError(f"standard input, line {line}: {text!r} has no tokens; remove the line") from None
        for text, result in zip(texts, vectors, strict=True):
            done += 1
            truncated += result.is_truncated
            row = {"text": text, "tokens": result.tokens, "embedding": result.vector}
            print(json.dumps(row, ensure_ascii=False))
    _warn_about_truncation(trained, truncated)


def _warn_about_truncation(trained: "TrainedModel", truncated: int) -> None:
    if truncated:
        limit = trained.model.config.max_positions
        print(f"multihop: warning: {truncated} texts were truncated to the model's {limit} positions", file=sys.stderr)


def _lines_of_file() -> int:
    """Return the number of remaining lines of standard input if it is a file; 0 if it is a pipe, whose length is
    unknown."""
    stream = _stdin()
    if not stream.seekable():
        return 0
    begin = stream.tell()  # a shell may have consumed the first lines
    lines = sum(1 for _ in stream)
    stream.seek(begin)
    return lines


def _input_lines() -> Iterator[str]:
    """Yield the lines of standard input, without line ends and byte order mark.

    Raises:
        UserError: a line is not UTF-8, or standard input is closed.
    """
    for number, line in enumerate(_stdin(), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input, line {number}: byte {error.start} of the line is not UTF-8; convert the text to UTF-8"
            ) from None
        yield text.removesuffix("\n").removesuffix("\r")


def _stdin() -> BinaryIO:
    if sys.stdin is None:  # a shell's `<&-` closes it
        raise UserError("standard input is closed; pass one text per line, as in `< texts.txt`")
    return sys.stdin.buffer


def _batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, size)):
        yield batch


def _load(location: str, step: int | None) -> "TrainedModel":
    from multihop.common.machine import disable_malloc_trim
    from multihop.eval.inference.trained_model import load_model

    disable_malloc_trim()
    return load_model(location, step)
