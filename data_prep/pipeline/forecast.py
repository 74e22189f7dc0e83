"""Estimates what a preparation would do and need, without writing anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multihop.data_prep.config import DataConfig, TokenizerConfig, check_tokenizer
from multihop.data_prep.dataset.shards import token_dtype
from multihop.data_prep.dataset.verify import read_if_verified
from multihop.data_prep.duplicates.signature_files import signature_bytes
from multihop.data_prep.pipeline.identity import known_identities, resolve_known_inputs
from multihop.data_prep.pipeline.prepare import read_item
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_open_range
from multihop.data_prep.reading.sources import FileRange, InputFile, group_into_splits, with_targets
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.tokenizer import parse
from multihop.data_prep.tokenizers.training import training_memory

_SAMPLED_BYTES = 32 * 2**20
"""Bytes of text to read of each source."""
_TRIED = 5
"""Files of a source to try, until one can be read."""
_BYTES_A_TOKEN = 4.0
"""English has 4 to 5 bytes per token with vocabularies of 8,000 to 32,000 tokens."""
_LZ4 = 0.7
"""Approximate compression ratio of lz4 on English text."""
_HASHES = 40
"""Bytes per document in the stages that look for copies."""


@dataclass(frozen=True)
class SourceForecast:
    """Describes one source."""

    path: str
    files: int
    bytes: int
    text_bytes: int
    """Estimated from its beginning."""
    documents: int
    """Estimated from its beginning."""


@dataclass(frozen=True)
class Forecast:
    """Describes the sources, and what preparing them takes."""

    sources: list[SourceForecast]
    is_prepared: bool
    """True if the data set is prepared and verified, so that nothing would be done."""
    splits: int
    splits_read: int
    """Number of splits that an earlier preparation has read."""
    sample_bytes: int
    """Bytes of text to train the tokenizer on; 0: an existing one is used."""
    training_bytes: int
    """Bytes of memory for training the tokenizer."""
    work_bytes: int
    """Bytes on disk for the stages' outputs."""
    data_bytes: int
    """Bytes on disk for the data set."""


def forecast(
    data: DataConfig, tok: TokenizerConfig, files: Sequence[InputFile], out_dirs: Sequence[Path], work: Path
) -> Forecast:
    """Estimate from the files' sizes and some text of each source.

    Args:
        files: the sources' files, from `list_files`.
        out_dirs: the existing data sets of these sources.
        work: the directory of the stages' outputs.

    Raises:
        ReadFailed: a server does not answer.
        UserError: as `resolve_inputs`.
    """
    sources = [
        _forecast_source(source.path, [file for file in files if file.source == number])
        for number, source in enumerate(data.sources)
    ]
    check_tokenizer(data, tok)
    known = known_identities(files, work)
    resolved = resolve_known_inputs(data, tok, files, work)
    splits = group_into_splits(
        identities.with_identities(files, {file.path: known.get(file.path, "") for file in with_targets(files)})
    )
    entries = [work / "read" / f"{read_item(work, parts, data).key}.json" for parts in splits]
    text, documents = (sum(getattr(source, name) for source in sources) for name in ("text_bytes", "documents"))
    sample = 0 if not tok.is_from_sample else int(min(tok.sample_mb * 1e6, text))
    vocab_size = tok.vocab_size
    if tok.path is not None:
        vocab_size = parse(import_tokenizer(tok.path, tok.lowercase, data.holds_pairs)).vocab_size + tok.add_words
    tokens = text / _BYTES_A_TOKEN * (2 if token_dtype(vocab_size) == "uint16" else 4)
    is_cut = data.decontaminate is not None and data.decontaminate.action == "cut"  # then signed a second time
    near = 0 if data.near_duplicates is None else signature_bytes(data.near_duplicates) * documents * (1 + is_cut)
    return Forecast(
        sources=sources,
        is_prepared=resolved is not None
        and any(read_if_verified(out_dir, resolved.identity) is not None for out_dir in out_dirs),
        splits=len(splits),
        splits_read=sum(entry.exists() for entry in entries),
        sample_bytes=sample,
        training_bytes=training_memory(tok, sample) if sample else 0,
        work_bytes=int(text * _LZ4 + _HASHES * documents + near + sample * _LZ4 + tokens),
        data_bytes=int(tokens),
    )


def _forecast_source(path: str, files: list[InputFile]) -> SourceForecast:
    """Extrapolate texts and documents from the file of median size, or from a neighbor if that is unreadable."""
    size = sum(file.size for file in files)
    readable = sorted((file for file in files if file.size and not file.problem), key=lambda file: file.size)
    middle = len(readable) // 2
    text = documents = 0.0
    for index in sorted(range(len(readable)), key=lambda index: abs(index - middle))[:_TRIED]:
        text_a_byte, documents_a_byte = _density(readable[index])
        text, documents = text_a_byte * size, documents_a_byte * size
        if text:
            break
    if text and all(file.format == "txt" and file.documents == "file" for file in readable):
        documents = len(readable)
    bytes_on_disk = sum(file.bytes for file in files)
    return SourceForecast(path, len(list(with_targets(files))), bytes_on_disk, int(text), int(documents))


def _density(file: InputFile) -> tuple[float, float]:
    """Return bytes of text, and documents, per byte of a file; 0 if it cannot be read."""
    file_range = FileRange(file, 0, min(file.size, _SAMPLED_BYTES) if file.is_splittable else file.size)
    text = documents = 0
    try:
        with FileReader(file) as reader:
            for document in read_open_range(file_range, reader):
                if not isinstance(document, BadDocument):
                    sides = (document,) if isinstance(document, str) else document
                    text += sum(len(side.encode(errors="replace")) for side in sides)
                    documents += 1
                if text > _SAMPLED_BYTES:
                    break
            read = file_range.stop if file.is_splittable and text <= _SAMPLED_BYTES else reader.max_offset
    except UnreadableFileError:
        return 0.0, 0.0
    return text / max(read, 1), documents / max(read, 1)
