"""Filters documents by the rules that a recipe enables."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from multihop.common.errors import UserError
from multihop.data_prep.config import FilterConfig, LanguageFilter
from multihop.data_prep.rules import c4, gopher, languages, pairs
from multihop.data_prep.rules.rule import Document, Rule


@dataclass(frozen=True)
class DroppedDocument:
    """Reports a document that a rule drops."""

    reason: str


Filter = Callable[[str], str | DroppedDocument]


def make_filter(config: FilterConfig) -> Filter:
    """Make a function that returns a cleaned text, as edited by C4's rules, or why it is dropped.

    Loads what the rules need. The function's result depends on the text and `config` only; it is thread-safe. Edits
    come first, then C4's other rules, the language, Gopher's quality and Gopher's repetition; the first rule that drops
    a document is the reason.

    Raises:
        UserError: py3langid is needed and not installed, a language is unknown, or the list of bad words cannot be
            read.
    """
    edit = c4.make_editor(config.c4) if config.c4 else None
    rules = _rules(config)

    def apply(text: str) -> str | DroppedDocument:
        if edit is not None:
            text = edit(text)
        document = Document(text)
        for reason, drops in rules:
            if drops(document):
                return DroppedDocument(reason)
        return text

    return apply


def drop_reasons(config: FilterConfig) -> list[str]:
    """Return all reasons that `make_filter(config)` can return, in the order of its rules.

    Raises:
        UserError: as `make_filter`.
    """
    return [reason for reason, _ in _rules(config)]


def dependencies(config: FilterConfig) -> dict[str, str]:
    """Return what the results depend on besides `config`: the hash of the list of bad words, and versions of packages.

    Raises:
        UserError: as `make_filter`.
    """
    versions = {}
    if config.c4 and config.c4.bad_words is not None:
        versions["bad_words"] = c4.bad_words_hash(config.c4.bad_words)
    if config.c4 and config.c4.min_sentences is not None:
        versions["sentences"] = f"sentencex {version('sentencex')}"
    if config.language:
        versions["languages"] = languages.model_version()
    return versions | pairs.dependencies(config.pairs)


def _rules(config: FilterConfig) -> list[Rule]:
    return [
        *(c4.make_rules(config.c4) if config.c4 else []),
        *(_language_rules(config.language) if config.language else []),
        *(gopher.quality_rules(config.gopher_quality) if config.gopher_quality else []),
        *(gopher.repetition_rules(config.gopher_repetition) if config.gopher_repetition else []),
    ]


def _language_rules(config: LanguageFilter) -> list[Rule]:
    known = languages.labels()
    unknown = sorted(set(config.keep) - set(known))
    if unknown:
        raise UserError(
            f"data.filters.language.keep holds {', '.join(unknown)}, expected codes from {', '.join(sorted(known))}"
        )
    keep = frozenset(config.keep)
    return [
        ("in a language that is not kept", lambda document: document.language[0] not in keep),
        (f"language less probable than {config.min_score:g}", lambda document: document.language[1] < config.min_score),
    ]
