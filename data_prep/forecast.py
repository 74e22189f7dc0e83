"""What a preparation would do, and about how large it gets, before it is started; nothing is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.duplicates.signed_splits import bytes_of_signed
from data_prep.pipeline import already_prepared, read_item
from data_prep.reading import inputs
from data_prep.reading.failures import UnreadableFileError
from data_prep.reading.opening import OpenedFile
from data_prep.reading.readers import Bad, read_opened
from data_prep.reading.sources import InputFile, Part, group_into_splits, list_files
from data_prep.shards import token_dtype
from data_prep.tokenizers.training import training_memory

_LOOKED_AT = 32 * 2**20
"""Bytes of text that are read of each source."""
_BYTES_A_TOKEN = 4.0
"""English has 4 to 5 bytes a piece with 8,000 to 32,000 pieces."""
_LZ4 = 0.7
"""What lz4 leaves of English text, about."""
_HASHES = 40
"""Bytes for each document in the stages that look for copies."""


@dataclass(frozen=True)
class OfSource:
    """One source as it lies there."""

    path: str
    files: int
    bytes: int
    text_bytes: int
    """Estimated from its beginning."""
    documents: int
    """Estimated likewise."""


@dataclass(frozen=True)
class Forecast:
    """All sources, and what preparing them takes."""

    sources: list[OfSource]
    stands: bool
    """The data set is there: nothing would be done."""
    splits: int
    splits_read: int
    """Of these, read by an earlier preparation."""
    sample_bytes: int
    """Text that the tokenizer is trained on; 0 where an existing one is used."""
    training_bytes: int
    """Memory that the training takes."""
    work_bytes: int
    """Disk for the stages' outputs."""
    data_bytes: int
    """Disk for the data set."""


def forecast(data: DataConfig, tok: TokenizerConfig, out_dirs: Sequence[Path], work: Path) -> Forecast:
    """Look at the sources, and read some text of each.

    Args:
        out_dirs: the data sets that there are of these sources.
        work: of the stages.

    Raises ValueError for a missing source, ReadFailed when a server does not answer.
    """
    files = list_files(data.sources)
    sources = [
        _of_source(source.path, [file for file in files if file.source == number])
        for number, source in enumerate(data.sources)
    ]
    known = inputs.recall(work / "inputs.json", files)
    splits = group_into_splits(inputs.identified(files, {file.path: known.get(file.path, "") for file in files}))
    entries = [work / "read" / f"{read_item(work, parts, data).key}.json" for parts in splits]
    text, documents = (sum(getattr(source, name) for source in sources) for name in ("text_bytes", "documents"))
    sample = 0 if tok.path is not None else int(min(tok.sample_mb * 1e6, text))
    tokens = text / _BYTES_A_TOKEN * (2 if token_dtype(tok.vocab_size) == "uint16" else 4)
    near = 0 if data.near_duplicates is None else bytes_of_signed(data.near_duplicates) * documents
    return Forecast(
        sources=sources,
        stands=any(already_prepared(data, tok, out_dir, work) is not None for out_dir in out_dirs),
        splits=len(splits),
        splits_read=sum(entry.exists() for entry in entries),
        sample_bytes=sample,
        training_bytes=training_memory(tok, sample) if sample else 0,
        work_bytes=int(text * _LZ4 + _HASHES * documents + near + sample * _LZ4 + tokens),
        data_bytes=int(tokens),
    )


def _of_source(path: str, files: list[InputFile]) -> OfSource:
    """Texts and documents are reckoned from a file of the middle size."""
    size = sum(file.size for file in files)
    readable = sorted((file for file in files if file.size and not file.problem), key=lambda file: file.size)
    text = documents = 0.0
    if readable:
        text_a_byte, documents_a_byte = _density(readable[len(readable) // 2])
        text, documents = text_a_byte * size, documents_a_byte * size
    return OfSource(path, len(files), size, int(text), int(documents))


def _density(file: InputFile) -> tuple[float, float]:
    """Bytes of text, and documents, for each byte of a file; nothing of one that cannot be read."""
    part = Part(file, 0, min(file.size, _LOOKED_AT) if file.can_be_cut else file.size)
    text = documents = 0
    try:
        with OpenedFile(file) as opened:
            for document in read_opened(part, opened):
                if not isinstance(document, Bad):
                    text += len(document.encode(errors="replace"))
                    documents += 1
                if text > _LOOKED_AT:
                    break
            read = part.stop if file.can_be_cut and text <= _LOOKED_AT else opened.furthest
    except UnreadableFileError:
        return 0.0, 0.0
    return text / max(read, 1), documents / max(read, 1)
