"""Messages that the documentation quotes are those that the program prints.

In indented blocks, quotations are lines that begin with `multihop: `, a time or ✗, and the lines below a command after
`$ `. In the text, they are code and words in double quotes that begin as a sentence. Each must be a string of the code
with values filled in. A value is short, or is such a string itself.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("cluster", "common", "data_prep", "eval", "pretrain")
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LONGEST_VALUE = 5
"""Number of words of the longest value that need not be a string of the code."""
FEWEST_LETTERS, OF_A_LABEL = 6, 3
"""Minimum number of letters of the fixed part of a string, since `{}: {}` would match anything.

The second number is for strings without values, and strings that begin with a label in a column.
"""
BLOCK = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
PRINTED = re.compile(r"multihop: |\d\d:\d\d:\d\d |✗ ")
PROGRAMS = "pip|python|ray|mlflow|multihop|torchrun"
SENTENCE = re.compile(
    rf"(?!({PROGRAMS}) )[a-z]{{2,}} [a-z']+[,;:]? .*"
    r"|(\d\d:\d\d:\d\d|\d+|\w+\.\w+) [a-z]{2,}[,;:]? [\w',]+ .*"
)
INLINE = re.compile(r'`([^`\n]+)`|"([^"\n]+)"')
TABLES = re.compile(r"multihop (inspect batch|checkpoints list|fill-mask) ")
"""Commands whose output is data."""
DATA = re.compile(r"…|│ .* │|\d+|\S+ +[\d,]+ bytes|\(.*\)|(prepare|pretrain|evaluate) +\d+/\d+ .*")
"""Lines below a command that are not messages: an omission, a row of a table, an exit code, a size, a remark, a
progress line."""
OF_OTHERS = (
    r"bash: line \d+: \S+: No such file or directory",
    r"\[Errno 28\] No space left on device",
    r"the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats",
    r"(deepspeed|torch) [\d.]+",
)
"""Values that other programs print."""


@cache
def templates() -> list[re.Pattern[str]]:
    """Return every string of the code, with a group for each value in it, those with the longest fixed part first."""
    texts = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.add(tuple(part.value if isinstance(part, ast.Constant) else None for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 1000:
                first, *others = re.split(r"%(?:\.\d)?[sdfr]|\{[^{}]*\}", node.value)
                texts.add((first, *(part for other in others for part in (None, other))))
    found = []
    for parts in texts:
        fixed = "".join(part or "" for part in parts).lstrip("\n")
        is_short = None not in parts or re.match("[a-z]+ {2,}", fixed)
        if len(re.findall("[A-Za-z]", fixed)) >= (OF_A_LABEL if is_short else FEWEST_LETTERS):
            pattern = "".join("(.*?)" if part is None else re.escape(part) for part in parts)
            found.append((len(fixed), pattern.removeprefix("\\\n")))
    return [re.compile(pattern, re.DOTALL) for _, pattern in sorted(found, reverse=True)]


@cache
def is_printed(text: str) -> bool:
    """Return whether the code has a string that becomes this text."""
    if len(text.split()) <= LONGEST_VALUE or any(re.fullmatch(pattern, text) for pattern in OF_OTHERS):
        return True
    return any(all(map(is_printed, match.groups())) for match in _matches(text))


def _matches(text: str) -> Iterator[re.Match[str]]:
    return (match for pattern in templates() if (match := pattern.fullmatch(text)) and match.groups() != (text,))


def is_message(text: str) -> bool:
    """Return whether the code prints a whole message, however short.

    It may begin with labels, or be several messages with semicolons between them.
    """
    if any(all(map(is_printed, match.groups())) for match in _matches(text)):
        return True
    label = re.match(r"multihop: |✗ |[^\s:]+: |[\w-]+ {2,}", text)
    if label is not None and is_message(text[label.end() :]):
        return True
    finding, colon, advice = text.rpartition(": ")
    if text.startswith("✗ ") and colon and is_message(finding) and is_message(advice):
        return True
    first, semicolon, rest = text.partition("; ")
    return bool(semicolon) and all(is_message(part[:1].lower() + part[1:].rstrip(".")) for part in (first, rest))


def quotations() -> Iterator[Any]:
    """Yield the quoted texts as parameters of a test, with the page and the line in the id."""
    for page in PAGES:
        text = page.read_text()

        def quotation(quoted: str, at: int, page: Path = page, text: str = text) -> Any:
            return pytest.param(quoted, id=f"{page.name}-{text[:at].count(chr(10)) + 1}")

        for block in BLOCK.finditer(text):
            command, at = "", block.start()
            for line in block[0].splitlines(keepends=True):
                content = line.strip()
                if content.startswith("$ "):
                    command = content.removeprefix("$ ")
                elif PRINTED.match(content) or (command and not TABLES.match(command) and not DATA.fullmatch(content)):
                    yield quotation(content, at)
                at += len(line)
        for match in INLINE.finditer(BLOCK.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)):
            quoted = match[1] or match[2]
            if SENTENCE.fullmatch(quoted):
                yield quotation(quoted, match.start())


@pytest.mark.parametrize("quoted", quotations())
def test_what_is_quoted_is_printed(quoted: str) -> None:
    assert is_message(quoted)


def test_a_stale_quotation_is_noticed() -> None:
    right = "multihop: runs/lamb was started with another recipe (seed was 1, is 2); set name=… for a new run"
    assert is_message(right)
    for old, new in (("started", "begun"), ("with another", "with a changed"), ("for a new run", "of a new run")):
        assert old in right and not is_message(right.replace(old, new))
