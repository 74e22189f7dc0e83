"""Surveys texts and this machine, for a first recipe."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from rich.filesize import decimal

from multihop.cluster.runs.starter_recipe import Machine, Text, pick_field
from multihop.common.errors import UserError
from multihop.common.machine import available_memory
from multihop.common.redaction import safe_text
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.forecast import SourceForecast, forecast
from multihop.data_prep.reading.sources import PACKAGE, list_files
from multihop.data_prep.reading.text_fields import WITH_FIELDS, some_texts, text_fields

_COVERAGE = 0.9995
"""The share of the text's characters that SentencePiece's tokenizers cover."""
_SAMPLE = 1000
"""Documents of each source whose characters are counted."""
_MANY_DOCUMENTS = 100
"""Enough documents to take each .txt file as one."""
_DOCUMENTS = {
    "file": "",
    "block": " (blocks between blank lines)",
    "line": " (lines)",
}


@dataclass(frozen=True)
class Survey:
    """A source, and the amount of text in it."""

    source: Source
    amount: SourceForecast
    characters: Counter[str]
    """Occurrences of each character in some of the documents."""

    def __str__(self) -> str:
        source, amount = self.source, self.amount
        field = f", text in the field {safe_text(source.field)}" if "field" in source.model_fields_set else ""
        warning = amount.warning(DataConfig.model_fields["max_bad_fraction"].default)
        return (
            f"{safe_text(source.path)}: {amount.files:,} file{'s' * (amount.files > 1)}, about "
            f"{decimal(amount.text_bytes)} of text in {amount.documents:,} "
            f"document{'s' * (amount.documents != 1)}{_DOCUMENTS[source.documents]}{field}"
            f"{f'; {safe_text(warning)}' if warning else ''}"
        )


def survey(path: str, field: str | None) -> Survey:
    """Examine the files of a path, a directory or a glob.

    Args:
        field: name of the field with the text; None: it is detected.

    Raises:
        UserError: It has no text that sources of documents read, or several fields could be the text.
    """
    _check_ending(path)
    if not ("://" in path or path.startswith(PACKAGE) or set(path) & set("*?[")) and not Path(path).exists():
        raise UserError(f"{safe_text(path)} does not exist; correct the path")
    source = Source(path=path)
    files = list_files([source])
    formats = {file.format for file in files if not file.problem}
    if formats & set(WITH_FIELDS):
        chosen = field or pick_field(text_fields(files), safe_text(path))
        source = Source(path=path) if chosen == "text" else Source(path=path, field=chosen)
    options = source.model_dump(exclude_unset=True)
    best = _measure(source)
    for kind in ("block", "line") if "txt" in formats else ():
        if best[1].documents >= _MANY_DOCUMENTS:
            break
        best = max(best, _measure(Source(**options, documents=kind)), key=lambda measured: measured[1].documents)
    source, amount = best
    if not amount.text_bytes:
        if formats & set(WITH_FIELDS):
            what = f"text in the field {safe_text(source.field)}; correct the path, the files or --field"
        else:
            what = "readable text: its files are empty or not UTF-8; correct the path or the files"
        raise UserError(f"{safe_text(path)} has no {what}")
    characters: Counter[str] = Counter()
    for document in islice(some_texts(list_files([source])), _SAMPLE):
        characters.update(document)
    return Survey(source, amount, characters)


def text_of(surveys: Sequence[Survey]) -> Text:
    """Return all sources together."""
    return Text(
        bytes=sum(each.amount.text_bytes for each in surveys),
        documents=sum(each.amount.documents for each in surveys),
        characters=_covering(sum((each.characters for each in surveys), Counter())),
    )


def this_machine() -> Machine:
    """Return the cores and GPUs that this process may use."""
    import torch

    cores, memory, gpus = len(os.sched_getaffinity(0)), available_memory(), torch.cuda.device_count()
    if not gpus:
        return Machine(cores, memory)
    free, _ = torch.cuda.mem_get_info(0)
    return Machine(cores, memory, gpus, torch.cuda.get_device_name(0), free, torch.cuda.is_bf16_supported())


def _check_ending(path: str) -> None:
    if Path(path).is_dir():
        return
    ending = PurePath(path.lower().removesuffix(".gz")).suffix
    if ending == ".csv":
        raise UserError(
            f"{safe_text(path)} is a .csv file, but texts to train on are .txt, .jsonl, .json, .parquet or .arrow; "
            "convert it, for example with pyarrow.csv.read_csv and pyarrow.parquet.write_table. Labeled .csv files "
            "are for tasks of eval.tasks"
        )
    if ending == ".tsv":
        raise UserError(
            f"{safe_text(path)} is a .tsv file, which holds pairs for translation, but init writes recipes for "
            "documents; for pairs begin with `multihop recipes copy translation`"
        )


def _measure(source: Source) -> tuple[Source, SourceForecast]:
    """Return the size and number of documents, estimated as by `multihop prep --dry-run`."""
    files = list_files([source])
    with TemporaryDirectory() as nothing:
        (amount,) = forecast(DataConfig(sources=[source]), TokenizerConfig(), files, [], Path(nothing)).sources
    return source, amount


def _covering(characters: Counter[str]) -> int:
    """Count the most frequent characters that make up the share that a tokenizer covers."""
    left = _COVERAGE * characters.total()
    for number, (_, count) in enumerate(characters.most_common(), start=1):
        left -= count
        if left <= 0:
            return number
    return len(characters)
