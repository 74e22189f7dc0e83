"""Read prepared data sets in tests."""

from pathlib import Path

from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.dataset.verify import VERIFIED, read_if_verified
from multihop.data_prep.pipeline.identity import resolve_known_inputs
from multihop.data_prep.reading.sources import list_files


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the data set's own files, without the stages' outputs and without the record of the files' times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != VERIFIED}


def already_prepared(
    data: DataConfig, tok: TokenizerConfig, out_dir: Path, work: Path | None = None
) -> Manifest | None:
    """Return the data set that a start finds in `out_dir` without reading an input or a shard; None if none."""
    resolved = resolve_known_inputs(data, tok, list_files(data.sources), work or out_dir / "work")
    return None if resolved is None else read_if_verified(out_dir, resolved.identity)
