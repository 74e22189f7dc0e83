"""A run's data set, as a start of the run finds or prepares it."""

from pathlib import Path

from multihop.cluster.runs.prepared import get_or_prepare_dataset, work_of
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.pipeline.identity import resolve_known_inputs
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.stages.runner import ReportProgress, no_report


def provided(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    store: Path,
    place: Path | None = None,
    report: ReportProgress = no_report,
    full: bool = False,
) -> tuple[Path, Manifest]:
    """Call `get_or_prepare_dataset` with the current inputs; without `place`, for a run that has no data yet."""
    files = list_files(data.sources)
    inputs = resolve_known_inputs(data, tokenizer, files, work_of(store))
    return get_or_prepare_dataset(data, tokenizer, files, inputs, store, place or store / "no-run", report, full)
