"""`multihop data`: verify and describe a prepared data set. Also the estimate of `multihop prep --dry-run`."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from multihop.cluster.console import plain, progress_line
from multihop.cluster.runs.prepared import work_of
from multihop.cluster.runs.recipe import Recipe
from multihop.common.errors import DONE, FAILED, UserError
from multihop.common.files import atomic_replace
from multihop.common.redaction import shown
from multihop.data_prep.dataset.manifest import MANIFEST, read_data_manifest
from multihop.data_prep.dataset.statistics import QUANTILES, Statistics, compute_statistics
from multihop.data_prep.dataset.verify import dataset_files, verify_files
from multihop.data_prep.pipeline.forecast import forecast
from multihop.data_prep.pipeline.identity import sources_key
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.stages.runner import map_in_process, with_progress

_SHARES = (0.5, 0.9, 0.99)


def data_set_at(place: str, runs: Path) -> Path:
    """The directory of a data set.

    Args:
        place: a run's name or directory, or the directory of the data set itself.
        runs: directory of all runs.

    Raises:
        UserError: There is no data set.
    """
    folders = [folder for root in (runs / place, Path(place)) for folder in (root, root / "data")]
    for folder in folders:
        if (folder / MANIFEST).is_file():
            return folder
    if (runs / place / "recipe.json").is_file():
        raise UserError(f"the run {runs / place} has no prepared data; run `multihop prep` with its recipe")
    with_data = ", ".join(sorted(path.parents[1].name for path in runs.glob(f"*/data/{MANIFEST}"))) or "none"
    raise UserError(
        f"no run {place} with prepared data in {runs} (runs with data: {with_data}), and no data set in the directory "
        f"{place} ({MANIFEST} is missing); give one of these runs, or the directory of a data set"
    )


def show_verdict(place: str, runs: Path) -> int:
    """Hash every file of the data set and print what is damaged; returns the exit code.

    Raises:
        UserError: there is no data set, or its manifest is damaged.
    """
    folder = data_set_at(place, runs)
    manifest = read_data_manifest(folder)
    files = len(dataset_files(manifest))
    with progress_line("verify   ") as line:
        map_items = partial(
            with_progress(map_in_process, lambda stage, done, total: line.update(done, total)), "verify"
        )
        damages = verify_files(folder, manifest, map_items, full=True)
    for sentence in damages:
        print(shown(sentence))
    print(f"{folder}: {files - len(damages)} of {files} files are intact")
    return FAILED if damages else DONE


def show_stats(place: str, runs: Path, picture: Path | None, as_json: bool) -> None:
    """Print statistics of the data set as tables or JSON, and write a plot to `picture`, a PNG file, unless it is None.

    Raises:
        UserError: there is no data set, or a file is missing or truncated.
    """
    found = compute_statistics(data_set_at(place, runs))
    if as_json:
        Console().print_json(data=_as_dict(found))
    else:
        console = Console()
        for number, source in enumerate(found.manifest.sources):
            console.print(plain(f"source {number}  {source}"), soft_wrap=True)
        for table in _tables(found):
            console.print(table)
    if picture is not None:
        draw(found, picture)
        print(f"wrote {shown(str(picture))}", file=sys.stderr if as_json else sys.stdout)


def show_forecast(recipe: Recipe, runs: Path) -> None:
    """Print an estimate of what preparing the recipe's data takes; nothing is written.

    Raises:
        UserError: a source is missing.
    """
    store = runs / ".prepared" / sources_key(recipe.data)
    standing = [path.parent for path in store.glob(f"*/{MANIFEST}")]
    found = forecast(recipe.data, recipe.tokenizer, list_files(recipe.data.sources), standing, work_of(store))
    what = "pairs" if recipe.data.holds_pairs else "documents"
    for number, source in enumerate(found.sources):
        print(
            f"source {number}  {shown(source.path)}: {source.files:,} files, {decimal(source.bytes)}, "
            f"about {decimal(source.text_bytes)} of text in {source.documents:,} {what}"
        )
    print(f"splits    {found.splits:,}, {found.splits_read:,} already read")
    if found.sample_bytes:
        trained = "one for each side, trained" if recipe.tokenizer.separate else "trained"
        print(
            f"tokenizer {trained} on {decimal(found.sample_bytes)} of text; needs about "
            f"{decimal(found.training_bytes)} of memory"
        )
    else:
        print(f"tokenizer {shown(str(recipe.tokenizer.path))}")
    print(
        f"disk      about {decimal(found.work_bytes)} in {work_of(store)}, which can be removed afterwards, and "
        f"{decimal(found.data_bytes)} for the data set"
    )
    print("status    prepared" if found.is_prepared else "status    not prepared; run without --dry-run to prepare it")


def draw(found: Statistics, path: Path) -> None:
    """Plot document lengths and token frequencies by rank, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(ncols=2, figsize=(11, 4), layout="constrained")
    for split, counts in found.length_counts.items():
        left.stairs(counts, [2**k for k in range(len(counts) + 1)], label=split, fill=split == "heldout")
    what, ids = ("pair", "target token") if found.manifest.pairs else ("document", "token")
    left.set(xscale="log", yscale="log", xlabel=f"tokens per {what}", ylabel=f"{what}s")
    left.legend()
    by_rank = np.sort(found.token_counts[found.token_counts > 0])[::-1]
    right.plot(np.arange(1, len(by_rank) + 1), by_rank)
    right.set(xscale="log", yscale="log", xlabel=f"{ids}, by frequency rank", ylabel="occurrences in train")
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _tables(found: Statistics) -> list[Table]:
    dropped = Table("stage", "outcome", "number", title="input by outcome", box=SIMPLE_HEAD)
    for stage, counts in found.manifest.counts.items():
        for reason, number in sorted(counts.items(), key=lambda item: -item[1]):
            dropped.add_row(plain(stage), plain(reason), f"{number:,}")
    pairs = found.manifest.pairs
    vocabulary = Table(
        "share of the train tokens" + (" of target sides" if pairs else ""),
        "covered by",
        title=f"vocabulary of {len(found.token_counts):,}",
        box=SIMPLE_HEAD,
    )
    for share in _SHARES:
        vocabulary.add_row(f"{share:.0%}", f"the {found.ids_that_make_up(share):,} most frequent tokens")
    vocabulary.add_row("0%", f"{int((found.token_counts == 0).sum()):,} tokens that never occur")
    return [*(_pairs(found) if pairs else [_documents(found)]), dropped, vocabulary]


def _documents(found: Statistics) -> Table:
    table = _by_length("tokens per document", "split", "source", "documents", "tokens")
    for part in found.groups:
        numbers = [part.source, part.documents, part.tokens, *part.lengths]
        table.add_row(part.split, *(f"{number:,}" for number in numbers))
    return table


def _pairs(found: Statistics) -> list[Table]:
    pairs = Table(title="pairs", box=SIMPLE_HEAD)
    for name in ("split", "source", "pairs", "source tokens", "target tokens", "target per source"):
        pairs.add_column(name, justify="left" if name == "split" else "right")
    lengths = _by_length("tokens per side", "split", "source", "side", "mean")
    for part in found.groups:
        assert part.sides is not None
        tokens = [side.tokens for side in part.sides.values()]
        numbers = [f"{number:,}" for number in (part.source, part.documents, *tokens)]
        pairs.add_row(part.split, *numbers, f"{tokens[1] / tokens[0]:.2f}")
        for name, side in part.sides.items():
            mean = f"{side.mean:.1f}"
            lengths.add_row(part.split, f"{part.source}", name, mean, *(f"{length:,}" for length in side.lengths))
    return [pairs, lengths]


def _by_length(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*columns, *(f"{quantile:.0%}" for quantile in QUANTILES)):
        table.add_column(name, justify="left" if name in ("split", "side") else "right", no_wrap=True)
    return table


def _as_dict(found: Statistics) -> dict[str, Any]:
    return {
        "fingerprint": found.manifest.fingerprint,
        "quantiles": QUANTILES,
        "parts": [asdict(part) for part in found.groups],
        "counts": found.manifest.counts,
        "documents_by_length": found.length_counts,
        "vocabulary_size": len(found.token_counts),
        "tokens_that_cover": {str(share): found.ids_that_make_up(share) for share in _SHARES},
        "tokens_that_never_occur": int((found.token_counts == 0).sum()),
    }
