"""The report's section on the tokenizer and the data, from data/ alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multihop.data_prep.dataset.manifest import Manifest, read_data_manifest, read_token_counts
from multihop.data_prep.dataset.statistics import GroupStatistics, compute_statistics
from multihop.data_prep.tokenizers.info import TokenizerInfo, word_start_flags
from multihop.eval.report.render import TemplateContext

Pairs = list[tuple[str, str]]

_SPLITS = {"train": "training", "heldout": "held-out"}
_LISTED_FILES = 50
_LISTED_SOURCES = 20
_MOST_DOCUMENTS = 20_000_000
"""Maximum number of documents whose lengths are read, at 8 bytes each. `multihop data stats` reads any number."""


def data_context(folder: Path, recipe: dict[str, Any]) -> TemplateContext:
    """Return the description of the tokenizer and the data, for the template.

    Values that need the token counts or the shards are left out if these are not on this machine.

    Args:
        recipe: the resolved recipe, which has the weights of the sources.

    Raises:
        UserError: the manifest, the token counts or a shard is damaged.
    """
    manifest = read_data_manifest(folder)
    has_counts = (folder / manifest.token_counts.file).exists()
    counts = read_token_counts(folder, manifest) if has_counts else None
    return {
        "text": _text_rows(manifest),
        "tokenizers": [
            (name, _tokenizer_rows(manifest, info, counts if info is manifest.output_tokenizer else None))
            for name, info in (
                ("Tokenizer", manifest.tokenizer),
                ("Tokenizer of the target sides", manifest.target_tokenizer),
            )
            if info is not None
        ],
        "dropped": [_outcomes(stage, outcomes) for stage, outcomes in manifest.counts.items()],
        **_sources(folder, manifest, (recipe.get("data") or {}).get("sources") or []),
        "set_aside": manifest.set_aside[:_LISTED_FILES],
        "more_set_aside": len(manifest.set_aside[_LISTED_FILES:]),
    }


def _text_rows(manifest: Manifest) -> Pairs:
    rows = [("fingerprint", manifest.fingerprint)]
    what = "pairs" if manifest.pairs else "documents"
    for split, total in manifest.totals.items():
        amount = f"{total.documents:,} {what}, {total.sentences:,} sentences, {total.tokens:,} tokens"
        rows.append((f"{_SPLITS[split]} text", f"{amount}, {total.text_bytes / 1e6:,.1f} MB"))
    return rows


def _tokenizer_rows(manifest: Manifest, info: TokenizerInfo, counts: np.ndarray | None) -> Pairs:
    """Return the rows that describe a tokenizer.

    Args:
        counts: int64 (vocab_size,), how often each token occurs in the training text; None: unknown.
    """
    path = (manifest.settings.get("tokenizer") or {}).get("path")
    rows = [
        ("kind", info.kind),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
        ("trained on", "these texts" if path is None else f"other texts: {path}"),
        ("SHA-256", info.sha256),
    ]
    if info.added is not None:
        added = f"{len(info.added.parts):,}"
        if info.added.tokens_before:
            saved = 1 - info.added.tokens_after / info.added.tokens_before
            rows.append(("added words", f"{added}, which save {saved:.1%} of the tokens of a sample of these texts"))
        else:
            rows.append(("added tokens", added))
    total = manifest.totals.get("train")
    if total and total.tokens and manifest.target_tokenizer is None:
        rows.append(("bytes per token", f"{total.text_bytes / total.tokens:.2f}"))
    if counts is None or not counts.sum():
        return rows
    words = int(counts[word_start_flags(info)].sum())
    if words:
        rows.append(("tokens per word", f"{counts.sum() / words:.2f}"))
    if "unk" in info.special_ids:
        rows.append(("unknown tokens", f"{counts[info.special_ids['unk']] / counts.sum():.4%}"))
    rows.append(("tokens that never occur", f"{int((counts == 0).sum()):,}"))
    return rows


def _outcomes(stage: str, outcomes: dict[str, int]) -> tuple[str, str, str]:
    """Return a stage's name, the number that it kept, and what it dropped by reason, the most frequent first."""
    reasons = sorted(((n, reason) for reason, n in outcomes.items() if reason != "kept"), key=lambda item: -item[0])
    dropped = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for n, reason in reasons if n)
    return stage.replace("_", " "), f"{outcomes['kept']:,}" if "kept" in outcomes else "", dropped or "nothing"


def _sources(folder: Path, manifest: Manifest, settings: Sequence[dict[str, Any]]) -> TemplateContext:
    """Return a line of the table for each of the largest sources, and the number of sources without a line."""
    documents = sum(total.documents for total in manifest.totals.values())
    if documents > _MOST_DOCUMENTS or not all((folder / shard.file).exists() for shard in manifest.shards):
        return {"sources": [], "more_sources": 0, "weighted": False}
    groups = compute_statistics(folder).groups
    tokens = {group.source: group.tokens for group in groups if group.split == "train"}
    heldout = {group.source: group.tokens for group in groups if group.split == "heldout"}
    weights = [source["weight"] for source in settings if source.get("weight")]
    weighted = len(weights) == len(manifest.sources)
    train = sorted((group for group in groups if group.split == "train"), key=lambda group: -group.tokens)
    lines = [
        [
            f"{group.source}: {manifest.sources[group.source]}",
            f"{group.tokens / sum(tokens.values()):.1%}",
            *([f"{weights[group.source] / sum(weights):.1%}"] if weighted else []),
            f"{group.documents:,}",
            f"{group.tokens:,}",
            f"{heldout.get(group.source, 0):,}",
            _lengths(group),
        ]
        for group in train[:_LISTED_SOURCES]
    ]
    return {"sources": lines, "more_sources": len(train[_LISTED_SOURCES:]), "weighted": weighted}


def _lengths(group: GroupStatistics) -> str:
    """Return median, minimum and maximum of the lengths in tokens; for pairs, those of each side."""
    sides = [group.lengths] if group.sides is None else [side.lengths for side in group.sides.values()]
    return " and ".join(map(_spread, sides))


def _spread(quantiles: Sequence[int]) -> str:
    return f"{quantiles[len(quantiles) // 2]:,} [{quantiles[0]:,} to {quantiles[-1]:,}]"
