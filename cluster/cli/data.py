"""The commands `data verify` and `data stats`, and the estimate of `prep --dry-run`."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multihop.cluster.cli.options import AsJson, DataPath, Runs
from multihop.common.errors import DONE, FAILED, UserError
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from rich.table import Table

    from multihop.cluster.runs.recipe import Recipe
    from multihop.data_prep.dataset.statistics import Statistics

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_SHARES = (0.5, 0.9, 0.99)


@data_app.command("verify")
def verify_data(data: DataPath, runs: Runs = Path("runs")) -> None:
    """Hash every file of a data set. Exit code 1: a file is damaged."""
    raise typer.Exit(show_verdict(data, runs))


@data_app.command("stats")
def data_stats(
    data: DataPath,
    runs: Runs = Path("runs"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot lengths and token frequencies to this PNG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show document lengths, sources and token frequencies. Also shows which documents were dropped, and why."""
    show_stats(data, runs, plot, as_json)


def data_set_at(name: str, runs: Path) -> Path:
    """Return the directory of a data set.

    Args:
        name: a run's name or directory, or the directory of the data set itself.
        runs: directory of all runs.

    Raises:
        UserError: there is no data set.
    """
    from multihop.data_prep.dataset.manifest import MANIFEST

    folders = [folder for root in (runs / name, Path(name)) for folder in (root, root / "data")]
    for folder in folders:
        if (folder / MANIFEST).is_file():
            return folder
    if (runs / name / "recipe.json").is_file():
        raise UserError(f"the run {runs / name} has no prepared data; run `multihop prep` with its recipe")
    with_data = ", ".join(sorted(path.parents[1].name for path in runs.glob(f"*/data/{MANIFEST}"))) or "none"
    raise UserError(
        f"no run {name} with prepared data in {runs} (runs with data: {with_data}), and no data set in the directory "
        f"{name} ({MANIFEST} is missing); give one of these runs, or the directory of a data set"
    )


def show_verdict(name: str, runs: Path) -> int:
    """Hash every file of the data set and print what is damaged; returns the exit code.

    Raises:
        UserError: there is no data set, or its manifest is damaged.
    """
    from multihop.cluster.console import progress_line
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.data_prep.dataset.verify import dataset_files, verify_files
    from multihop.data_prep.stages.runner import map_in_process, with_progress

    folder = data_set_at(name, runs)
    manifest = read_data_manifest(folder)
    files = len(dataset_files(manifest))
    with progress_line("verify   ") as line:
        map_items = partial(
            with_progress(map_in_process, lambda stage, done, total: line.update(done, total)), "verify"
        )
        damages = verify_files(folder, manifest, map_items, full=True)
    for sentence in damages:
        print(safe_text(sentence))
    print(f"{folder}: {files - len(damages)} of {files} files are intact")
    return FAILED if damages else DONE


def show_stats(name: str, runs: Path, plot: Path | None, as_json: bool) -> None:
    """Print statistics of the data set as tables or JSON, and write a plot to `plot`, a PNG file, unless it is None.

    Raises:
        UserError: there is no data set, or a file is missing or truncated.
    """
    from rich.console import Console

    from multihop.cluster.console import plain
    from multihop.data_prep.dataset.statistics import compute_statistics

    statistics = compute_statistics(data_set_at(name, runs))
    if as_json:
        Console().print_json(data=_as_dict(statistics))
    else:
        console = Console()
        for number, source in enumerate(statistics.manifest.sources):
            console.print(plain(f"source {number}  {source}"), soft_wrap=True)
        for table in _tables(statistics):
            console.print(table)
    if plot is not None:
        draw(statistics, plot)
        print(f"wrote {safe_text(str(plot))}", file=sys.stderr if as_json else sys.stdout)


def show_forecast(recipe: "Recipe", runs: Path) -> None:
    """Print an estimate of what preparing the recipe's data takes; nothing is written.

    Raises:
        UserError: a source is missing.
    """
    from rich.filesize import decimal

    from multihop.cluster.runs.prepared import work_of
    from multihop.data_prep.dataset.manifest import MANIFEST
    from multihop.data_prep.pipeline.forecast import forecast
    from multihop.data_prep.pipeline.identity import sources_key
    from multihop.data_prep.reading.sources import list_files

    store = runs / ".prepared" / sources_key(recipe.data)
    prepared = [path.parent for path in store.glob(f"*/{MANIFEST}")]
    estimate = forecast(recipe.data, recipe.tokenizer, list_files(recipe.data.sources), prepared, work_of(store))
    what = "pairs" if recipe.data.holds_pairs else "documents"
    for number, source in enumerate(estimate.sources):
        print(
            f"source {number}  {safe_text(source.path)}: {source.files:,} files, {decimal(source.bytes)}, "
            f"about {decimal(source.text_bytes)} of text in {source.documents:,} {what}"
        )
        if warning := source.warning(recipe.data.max_bad_fraction):
            print(f"          {safe_text(warning)}")
    print(f"splits    {estimate.splits:,}, {estimate.splits_read:,} already read")
    if recipe.tokenizer.path is not None:
        added = f", and {recipe.tokenizer.add_words:,} words of {decimal(estimate.sample_bytes)} of text"
        print(f"tokenizer {safe_text(recipe.tokenizer.path)}{added if recipe.tokenizer.add_words else ''}")
    elif estimate.sample_bytes:
        trained = "one for each side, trained" if recipe.tokenizer.separate_vocabularies else "trained"
        print(
            f"tokenizer {trained} on {decimal(estimate.sample_bytes)} of text; needs about "
            f"{decimal(estimate.training_bytes)} of memory"
        )
    print(
        f"disk      about {decimal(estimate.work_bytes)} in {work_of(store)}, which can be removed afterwards, and "
        f"{decimal(estimate.data_bytes)} for the data set"
    )
    print(
        "status    prepared" if estimate.is_prepared else "status    not prepared; run without --dry-run to prepare it"
    )


def draw(statistics: "Statistics", path: Path) -> None:
    """Plot document lengths and token frequencies by rank, as a PNG."""
    import numpy as np

    from multihop.common.files import write_atomically
    from multihop.eval.report.plot_style import LINE_WIDTH, PAPER, as_png, legend, new_figure, style

    train, heldout, *_ = PAPER.series
    figure, (left, right) = new_figure(columns=2)
    for split, color in (("train", train), ("heldout", heldout)):
        counts = statistics.length_counts[split]
        left.stairs(counts, [2**k for k in range(len(counts) + 1)], label=split, color=color, fill=split == "heldout")
    what, ids = ("pair", "target token") if statistics.manifest.pairs else ("document", "token")
    by_rank = np.sort(statistics.token_counts[statistics.token_counts > 0])[::-1]
    right.plot(np.arange(1, len(by_rank) + 1), by_rank, color=train, linewidth=LINE_WIDTH)
    for axes, below, title in (
        (left, f"tokens per {what}", f"{what}s"),
        (right, f"{ids}, by frequency rank", "occurrences in train"),
    ):
        axes.set(xscale="log", yscale="log")
        style(axes, PAPER, below, title)
    legend(left, PAPER, above=True, columns=2)
    write_atomically(path, as_png(figure))


def _tables(statistics: "Statistics") -> "list[Table]":
    from multihop.cluster.console import plain

    dropped = _table("input by outcome", "stage", "outcome", "number")
    for stage, counts in statistics.manifest.counts.items():
        for reason, number in sorted(counts.items(), key=lambda item: -item[1]):
            dropped.add_row(plain(stage), plain(reason), f"{number:,}")
    pairs = statistics.manifest.pairs
    share_of = "share of the train tokens" + (" of target sides" if pairs else "")
    vocabulary = _table(f"vocabulary of {len(statistics.token_counts):,}", share_of, "covered by")
    for share in _SHARES:
        vocabulary.add_row(f"{share:.0%}", f"the {statistics.ids_that_make_up(share):,} most frequent tokens")
    vocabulary.add_row("0%", f"{int((statistics.token_counts == 0).sum()):,} tokens that never occur")
    return [*(_pairs(statistics) if pairs else [_documents(statistics)]), dropped, vocabulary]


def _documents(statistics: "Statistics") -> "Table":
    table = _by_length("tokens per document", "split", "source", "documents", "tokens")
    for part in statistics.groups:
        numbers = [part.source, part.documents, part.tokens, *part.lengths]
        table.add_row(part.split, *(f"{number:,}" for number in numbers))
    return table


def _pairs(statistics: "Statistics") -> "list[Table]":
    pairs = _table("pairs")
    for name in ("split", "source", "pairs", "source tokens", "target tokens", "target per source"):
        pairs.add_column(name, justify="left" if name == "split" else "right")
    lengths = _by_length("tokens per side", "split", "source", "side", "mean")
    for part in statistics.groups:
        assert part.sides is not None
        tokens = [side.tokens for side in part.sides.values()]
        numbers = [f"{number:,}" for number in (part.source, part.documents, *tokens)]
        pairs.add_row(part.split, *numbers, f"{tokens[1] / tokens[0]:.2f}")
        for name, side in part.sides.items():
            mean = f"{side.mean:.1f}"
            lengths.add_row(part.split, f"{part.source}", name, mean, *(f"{length:,}" for length in side.lengths))
    return [pairs, lengths]


def _by_length(title: str, *columns: str) -> "Table":
    from multihop.data_prep.dataset.statistics import QUANTILES

    table = _table(title)
    table.padding = (0, 1, 0, 0)
    for name in (*columns, *(f"{quantile:.0%}" for quantile in QUANTILES)):
        table.add_column(name, justify="left" if name in ("split", "side") else "right", no_wrap=True)
    return table


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(*columns, title=title, box=SIMPLE_HEAD)


def _as_dict(statistics: "Statistics") -> dict[str, Any]:
    from multihop.data_prep.dataset.statistics import QUANTILES

    return {
        "fingerprint": statistics.manifest.fingerprint,
        "quantiles": QUANTILES,
        "parts": [asdict(part) for part in statistics.groups],
        "counts": statistics.manifest.counts,
        "documents_by_length": statistics.length_counts,
        "vocabulary_size": len(statistics.token_counts),
        "tokens_that_cover": {str(share): statistics.ids_that_make_up(share) for share in _SHARES},
        "tokens_that_never_occur": int((statistics.token_counts == 0).sum()),
    }
