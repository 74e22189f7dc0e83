"""`multihop data`: whether every byte of a prepared data set is as it was written, and what is in it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from cluster.prep import work_of
from cluster.progress import plain, progress_line
from cluster.recipe import Recipe
from data_prep.files import replacing
from data_prep.forecast import forecast
from data_prep.identity import sources_key
from data_prep.manifest import MANIFEST, read_manifest
from data_prep.shards import complaint, dataset_files
from data_prep.shown import shown
from data_prep.statistics import QUANTILES, Statistics, gather
from data_prep.tokenizers.tokenizer import info_complaint

_SHARES = (0.5, 0.9, 0.99)


def data_set_at(place: Path) -> Path:
    """The data set that a user means by its folder or by that of a run.

    Raises:
        ValueError: there is none.
    """
    for folder in (place, place / "data"):
        if (folder / MANIFEST).is_file():
            return folder
    raise ValueError(f"{place} holds no prepared data set ({MANIFEST} is missing); name one, or a run's folder")


def show_verdict(place: Path) -> int:
    """Hash every file of the data set; the exit code: 0 if all are as they were written, else 1.

    Raises:
        ValueError: there is none, or its manifest is damaged.
    """
    folder = data_set_at(place)
    manifest = read_manifest(folder)
    files = dataset_files(folder, manifest)
    damages = []
    with progress_line("verify   ") as line:
        for done, file in enumerate(files, start=1):
            damages += [sentence] if (sentence := complaint(file)) else []
            line.update(done, len(files))
    bad = len(damages)
    if not bad and (sentence := info_complaint(folder, manifest)):
        damages.append(sentence)
    for sentence in damages:
        print(shown(sentence))
    print(f"{folder}: {len(files) - bad} of {len(files)} files are as they were written")
    return 1 if damages else 0


def show_stats(place: Path, picture: Path, as_json: bool) -> None:
    """Print what the data set holds: as tables with a picture beside them, or as JSON.

    Raises:
        ValueError: there is none, or a file is missing or cut.
    """
    found = gather(data_set_at(place))
    if as_json:
        Console().print_json(data=_as_dict(found))
    else:
        console = Console()
        for number, source in enumerate(found.manifest.sources):
            console.print(plain(f"source {number}  {source}"), soft_wrap=True)
        for table in _tables(found):
            console.print(table)
        draw(found, picture)
        print(f"picture   {picture}")


def show_forecast(recipe: Recipe, runs: Path) -> None:
    """Print what preparing the recipe's text would do and take; nothing is written.

    Raises:
        ValueError: a source is missing.
    """
    store = runs / ".prepared" / sources_key(recipe.data)
    standing = [path.parent for path in store.glob(f"*/{MANIFEST}")]
    found = forecast(recipe.data, recipe.tokenizer, standing, work_of(store))
    for number, source in enumerate(found.sources):
        print(
            f"source {number}  {shown(source.path)}: {source.files:,} files, {decimal(source.bytes)}, "
            f"about {decimal(source.text_bytes)} of text in {source.documents:,} documents"
        )
    print(f"splits    {found.splits:,}, of which {found.splits_read:,} are read already")
    if found.sample_bytes:
        print(
            f"tokenizer trained on {decimal(found.sample_bytes)}, which takes about {decimal(found.training_bytes)} "
            "of memory"
        )
    else:
        print(f"tokenizer {shown(str(recipe.tokenizer.path))}")
    print(
        f"disk      about {decimal(found.work_bytes)} for the stages in {work_of(store)}, which may go afterwards, and "
        f"{decimal(found.data_bytes)} for the data set"
    )
    print("done      the data set is there" if found.stands else "done      not yet; leave --dry-run out to begin")


def draw(found: Statistics, path: Path) -> None:
    """Lengths of documents, and how often the pieces occur by their rank, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(ncols=2, figsize=(11, 4), layout="constrained")
    for split, counts in found.length_counts.items():
        left.stairs(counts, [2**k for k in range(len(counts) + 1)], label=split, fill=split == "heldout")
    left.set(xscale="log", yscale="log", xlabel="tokens of a document", ylabel="documents")
    left.legend()
    by_rank = np.sort(found.token_counts[found.token_counts > 0])[::-1]
    right.plot(np.arange(1, len(by_rank) + 1), by_rank)
    right.set(xscale="log", yscale="log", xlabel="rank of the piece", ylabel="occurrences in train")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _tables(found: Statistics) -> list[Table]:
    documents = Table(title="tokens of a document", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("split", "source", "documents", "tokens", *(f"{quantile:.0%}" for quantile in QUANTILES)):
        documents.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    for part in found.parts:
        numbers = [part.source, part.documents, part.tokens, *part.lengths]
        documents.add_row(part.split, *(f"{number:,}" for number in numbers))
    dropped = Table("stage", "outcome", "number", title="what became of the input", box=SIMPLE_HEAD)
    for stage, counts in found.manifest.counts.items():
        for reason, number in sorted(counts.items(), key=lambda item: -item[1]):
            dropped.add_row(plain(stage), plain(reason), f"{number:,}")
    pieces = Table(
        "share of the train tokens", "made up by", title=f"{len(found.token_counts):,} pieces", box=SIMPLE_HEAD
    )
    for share in _SHARES:
        pieces.add_row(f"{share:.0%}", f"the {found.ids_that_make_up(share):,} most frequent pieces")
    pieces.add_row("none", f"{int((found.token_counts == 0).sum()):,} pieces never occur")
    return [documents, dropped, pieces]


def _as_dict(found: Statistics) -> dict[str, Any]:
    return {
        "fingerprint": found.manifest.fingerprint,
        "quantiles": QUANTILES,
        "parts": [asdict(part) for part in found.parts],
        "counts": found.manifest.counts,
        "documents_by_length": found.length_counts,
        "pieces": len(found.token_counts),
        "pieces_that_make_up": {str(share): found.ids_that_make_up(share) for share in _SHARES},
        "pieces_that_never_occur": int((found.token_counts == 0).sum()),
    }
