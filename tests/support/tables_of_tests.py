"""Measurements of tests, shown after all of them have ended: with `-m long` or `-v`, in however many processes."""

import re
from collections.abc import Callable

import pytest

Table = Callable[[str], None]
_LINE = "line of a table"


@pytest.fixture
def table(record_property: Callable[[str, object], None]) -> Table:
    """A function that records a line of figures."""
    return lambda line: record_property(_LINE, line)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.markexpr.startswith("long") and config.option.verbose < 1:
        return
    lines: dict[str, list[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                named = lines.setdefault(re.split(r"\[|@", report.nodeid)[0], [])
                named += [str(line) for name, line in report.user_properties if name == _LINE]
    for name, found in sorted(lines.items()):
        if found:
            terminalreporter.section(name)
            terminalreporter.write_line("\n".join(sorted(found)))
