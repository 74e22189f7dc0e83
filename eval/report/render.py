"""Reports as Markdown, and as one HTML page each, from one Markdown template.

A template is Markdown with values, which are untrusted text: names, errors, values of a recipe. In the Markdown report
they are escaped. For the page the template is rendered with a placeholder in the position of each value, markdown-it
turns that into HTML, and then each placeholder is replaced by its value, escaped for HTML: no value is ever parsed as
Markdown. Templates may call

- `attributes(text)` at the beginning of a paragraph, list item, heading or cell, or alone before a table or list: HTML
  attributes of that element;
- `figure(picture)`: a picture from `Picture.context()`, which Markdown shows from a file and the page contains;
- `drawing(svg, caption)`: a picture that only the page has;
- `tag(text)` alone in a paragraph: an HTML tag around what follows.

The Markdown report leaves out attributes and tags. `is_page` says which of the two is rendered.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from multihop.common.redaction import safe_text

TemplateContext = dict[str, Any]
"""Values of a template, or of a section of it."""
_TEMPLATES = Path(__file__).parent
# An underscore within a word and a closing bracket without an opening one have no meaning in Markdown.
_MARKDOWN = re.compile(r"[\\`*\[|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLANK_LINES = re.compile(r"\n{3,}")
_MARKDOWN_AT_THE_START = re.compile(r"^(\d*)([-+=.)#])(?=[-=#\s]|$)")
_PLACEHOLDER = re.compile(
    r"<p>attributes(?P<before>\d+)end</p>\n(?P<wide><div class=\"wide\">)?<(?P<element>\w+)"
    r"|<(?P<around>\w+)>attributes(?P<within>\d+)end"
    r"|<p>raw(?P<block>\d+)end</p>"
    r"|value(?P<value>\d+)end"
)
_NO_HEADER = re.compile(r"<thead>\n<tr>\n(?:<th></th>\n)+</tr>\n</thead>\n")


def render(template: str, title: str, context: TemplateContext) -> tuple[bytes, bytes]:
    """Return a report as Markdown and as an HTML page. Values appear literally: markup in them is not interpreted.

    Args:
        template: the name of a .md.jinja file beside this one.
        title: title of the page.
    """
    from markdown_it import MarkdownIt

    markdown = _fill(template, context, _Markdown())
    placeholders = _Placeholders()
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = _NO_HEADER.sub("", parser.render(_fill(template, context, placeholders)))
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    page = _environment(autoescape=True).get_template("page.html.jinja")
    return markdown.encode(), page.render(title=title, body=placeholders.resolve(body)).encode()


def duration(seconds: float) -> str:
    """Return seconds as text, such as `4 min 5 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Markdown:
    """Values, escaped for a Markdown report."""

    is_page = False

    def value(self, value: Any) -> str:
        return value if hasattr(value, "__html__") else _escape_markdown(value)

    def attributes(self, text: str) -> Any:
        return _markup("")

    tag = attributes

    def figure(self, picture: dict[str, str]) -> Any:
        image = f"![{_escape_markdown(picture['alt'])}]({picture['file']})"
        return _markup(f"{image}\n\n{_escape_markdown(picture['caption'])}")

    def drawing(self, svg: str, caption: str = "") -> Any:
        return _markup("")


class _Placeholders:
    """Placeholders in the position of values and of HTML, and the contents that replace them."""

    is_page = True

    def __init__(self) -> None:
        self._contents: list[str] = []

    def value(self, value: Any) -> str:
        from markupsafe import escape

        if hasattr(value, "__html__"):
            return str(value)
        text = str(escape(safe_text(str(value))))
        return self._add("value", text) if text else ""

    def attributes(self, text: str) -> Any:
        return _markup(self._add("attributes", text))

    def tag(self, text: str) -> Any:
        return _markup(self._add("raw", text))

    def figure(self, picture: dict[str, str]) -> Any:
        return self.drawing(picture["svg"], picture["caption"])

    def drawing(self, svg: str, caption: str = "") -> Any:
        from markupsafe import escape

        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        return _markup(self._add("raw", f"<figure>{svg}{below}</figure>"))

    def resolve(self, html: str) -> Any:
        """Return the page with the contents filled in, in one pass: inserted text is not searched for placeholders."""
        return _markup(_PLACEHOLDER.sub(self._content_of, html))

    def _add(self, kind: str, content: str) -> str:
        self._contents.append(content)
        return f"{kind}{len(self._contents) - 1}end"

    def _content_of(self, placeholder: re.Match[str]) -> str:
        groups = placeholder.groupdict()
        if groups["before"]:
            return f"{groups['wide'] or ''}<{groups['element']} {self._contents[int(groups['before'])]}"
        if groups["within"]:
            return f"<{groups['around']} {self._contents[int(groups['within'])]}>"
        return self._contents[int(groups["block"] or groups["value"])]


def _fill(template: str, context: TemplateContext, output: _Markdown | _Placeholders) -> str:
    environment = _environment(finalize=output.value)
    environment.filters |= {
        "duration": duration,
        "cells": lambda values: _table_row(output, values),
    }
    names = ("attributes", "tag", "figure", "drawing", "is_page")
    helpers = {name: getattr(output, name) for name in names}
    text: str = environment.get_template(template).render(context | helpers)
    return _BLANK_LINES.sub("\n\n", text)


def _environment(**options: Any) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, **options)


def _table_row(output: _Markdown | _Placeholders, values: Iterable[Any]) -> Any:
    """Return one line of a Markdown table."""
    return _markup(f"| {' | '.join(map(output.value, values))} |")


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _escape_markdown(value: Any) -> str:
    """Escape `value` into one line of Markdown that renders literally, without HTML, links or table cells.

    File names, errors and recipe values are untrusted: somebody other than the reader may have chosen them.
    """
    text = " ".join(safe_text(str(value)).split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return _MARKDOWN_AT_THE_START.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", text))
