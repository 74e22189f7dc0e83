"""Reports as HTML and as Markdown, from templates."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from multihop.common.redaction import shown

TemplateContext = dict[str, Any]
"""What a template shows, or a section of it."""
_TEMPLATES = Path(__file__).parent
# An underscore within a word and a closing bracket without an opening one mean nothing in Markdown.
_MARKDOWN = re.compile(r"[\\`*\[|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLANK_LINES = re.compile(r"\n{3,}")
_MARKDOWN_AT_THE_START = re.compile(r"^(\d*)([-+=.)#])(?=[-=#\s]|$)")


def render(template: str, facts: TemplateContext) -> bytes:
    """A page from a template, with facts that are shown literally: no markup in them has a meaning.

    Args:
        template: the name of a .html.jinja or .md.jinja beside this file.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=html,
        finalize=None if html else _as_markdown,
        undefined=StrictUndefined,
        trim_blocks=html,
    )
    environment.filters |= {"duration": duration, "cells": _cells}
    page = environment.get_template(template).render(facts)
    return (page if html else _BLANK_LINES.sub("\n\n", page)).encode()


def _cells(values: Iterable[Any]) -> Any:
    """One line of a Markdown table."""
    from markupsafe import Markup

    return Markup(f"| {' | '.join(map(_as_markdown, values))} |")


def _as_markdown(value: Any) -> str:
    """Escape `value` into one line of Markdown that renders literally, without HTML, links or table cells.

    File names, errors and recipe values are untrusted: somebody other than the reader may have chosen them.
    """
    if hasattr(value, "__html__"):  # made by `_cells`
        return str(value)
    text = " ".join(shown(str(value)).split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return _MARKDOWN_AT_THE_START.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", text))


def duration(seconds: float) -> str:
    """Seconds in words: `4 min 5 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
