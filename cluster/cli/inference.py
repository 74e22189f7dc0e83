"""`multihop fill`, `generate`, `translate` and `embed`: a trained model on texts that a user gives."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from multihop.cluster.console import progress_line
from multihop.common.errors import UserError
from multihop.common.files import make_folder, write_atomically
from multihop.common.malloc import disable_malloc_trim
from multihop.common.redaction import shown
from multihop.eval.config import Pooling
from multihop.eval.inference.attention_map import attending
from multihop.eval.inference.beam_search import Search
from multihop.eval.inference.embed import NoTokensError, embed
from multihop.eval.inference.fill import fill
from multihop.eval.inference.generate import generate, stream
from multihop.eval.inference.sampling import Sampling
from multihop.eval.inference.trained_model import TrainedModel, load_model
from multihop.eval.inference.translate import translate, translator
from multihop.eval.report.attention_picture import draw_map
from multihop.eval.report.figures import as_png

_TEXTS_AT_ONCE = 64
_LINES_AT_ONCE = 512
"""To translate: batches of similar length are made of them."""


def show_filled(place: str, step: int | None, texts: Sequence[str], candidates: int, as_json: bool) -> None:
    """Print the likeliest tokens for the masks of each text."""
    trained = _open(place, step)
    for text, masks in zip(texts, fill(trained, texts, candidates), strict=True):
        if as_json:
            row = {"text": text, "masks": [[asdict(each) for each in mask] for mask in masks]}
            print(json.dumps(row, ensure_ascii=False))
            continue
        print(shown(text))
        for number, mask in enumerate(masks, start=1):
            if len(masks) > 1:
                print(f"mask {number}")
            for each in mask:
                print(f"{each.probability:8.1%}  {shown(each.token.strip())}")


def show_generated(
    place: str, step: int | None, prompts: Sequence[str], max_tokens: int, sampling: Sampling | None
) -> None:
    """Print each prompt with its continuation; one of a single prompt as it is generated."""
    trained = _open(place, step)
    if len(prompts) > 1:
        made = generate(trained, prompts, max_tokens, sampling)
        print("\n\n".join(shown(prompt + text) for prompt, text in zip(prompts, made, strict=True)))
        return
    parts = stream(trained, prompts[0], max_tokens, sampling)
    first = next(parts)  # a prompt that is refused must not be printed
    print(shown(prompts[0] + first), end="", flush=True)
    for part in parts:
        print(shown(part), end="", flush=True)
    print()


def show_translated(place: str, step: int | None, search: Search, maps: Path | None) -> None:
    """Print the translation of each line of standard input, in order, as soon as some are done.

    Args:
        maps: where to draw what the translation of line N attends to, N.png.
    """
    trained, cut, done = _open(place, step), 0, 0
    # A model that cannot do what is asked is refused before anything is read.
    translator(trained)
    if maps is not None:
        attending(trained)
        make_folder(maps)
    lines = _lines_of_file()
    with progress_line("translate") as line:
        for texts in _batches(_given_lines(), _LINES_AT_ONCE):
            for found in translate(trained, texts, search):
                done += 1
                cut += found.is_cut
                print(" ".join(found.text.splitlines()))  # byte tokens can decode to line breaks
                if maps is not None and found.tokens:
                    write_atomically(maps / f"{done}.png", as_png(draw_map(trained, found)))
            sys.stdout.flush()
            line.update(done, lines)
    if cut:
        limit = trained.model.config.max_positions
        print(f"multihop: warning: {cut} texts were cut to the model's {limit} positions", file=sys.stderr)


def show_embedded(place: str, step: int | None, pooling: Pooling) -> None:
    """Print a line of JSON for each line of standard input."""
    trained, cut, done = _open(place, step), 0, 0
    for texts in _batches(_given_lines(), _TEXTS_AT_ONCE):
        try:
            vectors = embed(trained, texts, pooling)
        except NoTokensError as error:
            line, text = done + error.number, texts[error.number - 1]
            raise UserError(f"standard input, line {line}: {text!r} has no tokens; remove the line") from None
        for text, found in zip(texts, vectors, strict=True):
            done += 1
            cut += found.is_cut
            row = {"text": text, "tokens": found.tokens, "embedding": found.vector}
            print(json.dumps(row, ensure_ascii=False))
    if cut:
        limit = trained.model.config.max_positions
        print(f"multihop: warning: {cut} texts were cut to the model's {limit} positions", file=sys.stderr)


def _lines_of_file() -> int:
    """Number of remaining lines of standard input if it is a file; 0 if it is a pipe, whose length is unknown."""
    given = _standard_input()
    if not given.seekable():
        return 0
    begin = given.tell()  # a shell may have consumed the first lines
    lines = sum(1 for _ in given)
    given.seek(begin)
    return lines


def _given_lines() -> Iterator[str]:
    """The lines of standard input, without line ends and byte order mark.

    Raises:
        UserError: A line is not UTF-8, or standard input is closed.
    """
    for number, line in enumerate(_standard_input(), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input, line {number}: byte {error.start} of the line is not UTF-8; convert the text to UTF-8"
            ) from None
        yield text.removesuffix("\n").removesuffix("\r")


def _standard_input() -> BinaryIO:
    if sys.stdin is None:  # a shell's `<&-` closes it
        raise UserError("standard input is closed; pass one text per line, as in `< texts.txt`")
    return sys.stdin.buffer


def _batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, size)):
        yield batch


def _open(place: str, step: int | None) -> TrainedModel:
    disable_malloc_trim()
    return load_model(place, step)
