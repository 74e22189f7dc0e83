"""Cleans the two sides of a pair, joins them to one text, and filters pairs."""

from collections.abc import Callable

from multihop.common.errors import UserError
from multihop.data_prep.config import PairFilters, PairLanguages
from multihop.data_prep.rules import languages
from multihop.data_prep.rules.clean import clean

PairFilter = Callable[[str, str], str | None]
"""(source, target), cleaned -> why the pair is dropped; None: it is kept."""
_SEPARATOR = "\t"


def clean_side(text: str, fix_mojibake: bool = False) -> str:
    """Clean `text` as a document (see `clean`), on one line with single spaces. Idempotent."""
    return " ".join(clean(text, fix_mojibake).split())


def join_sides(source: str, target: str) -> str:
    """Join two cleaned sides to the text of one document."""
    return source + _SEPARATOR + target


def split_sides(text: str) -> tuple[str, str]:
    """Split what `join_sides` returned into source and target."""
    source, _, target = text.partition(_SEPARATOR)
    return source, target


def make_pair_filter(config: PairFilters) -> PairFilter:
    """Make a function that returns the first reason to drop a pair of cleaned sides.

    Words are separated by spaces.

    Raises:
        UserError: a language is unknown, or py3langid is needed and not installed.
    """
    if config.languages is not None:
        _check_languages(config.languages)
    least, most = config.min_words or 0, config.max_words or float("inf")
    ratio, longest = config.max_ratio or float("inf"), config.max_word_length or float("inf")

    def apply(source: str, target: str) -> str | None:
        if config.drop_equal and source == target:
            return "equal sides"
        words = source.split(" "), target.split(" ")
        lengths = len(words[0]), len(words[1])
        if min(lengths) < least:
            return f"a side of fewer than {least} words"
        if max(lengths) > most:
            return f"a side of more than {most} words"
        if max(lengths) > ratio * min(lengths):
            return f"a side more than {ratio:g} times as long as the other"
        if max(len(source), len(target)) > longest and max(len(word) for side in words for word in side) > longest:
            return f"a word of more than {longest} characters"
        return None if config.languages is None else _other_language(source, target, config.languages)

    return apply


def dependencies(config: PairFilters | None) -> dict[str, str]:
    """Return the versions of packages that the results depend on besides `config`.

    Raises:
        UserError: as `make_pair_filter`.
    """
    if config is None or config.languages is None:
        return {}
    _check_languages(config.languages)
    return {"languages": languages.model_version()}


def _check_languages(config: PairLanguages) -> None:
    known = languages.labels()
    for side in ("source", "target"):
        if (code := getattr(config, side)) not in known:
            raise UserError(
                f"data.filters.pairs.languages.{side}={code}, expected a code from {', '.join(sorted(known))}"
            )


def _other_language(source: str, target: str, config: PairLanguages) -> str | None:
    for name, text, wanted in (("source", source, config.source), ("target", target, config.target)):
        language, score = languages.identify(text)
        if language != wanted and score >= config.min_score:
            return f"{name} not in {wanted}"
    return None
