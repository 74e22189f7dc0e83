"""Estimates what a preparation would do and need, without writing anything."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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
_SAMPLED_FILES = 20
"""Files of a source to read at most."""
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
    """Estimated from 32 MiB of text, from up to 20 files of all sizes."""
    documents: int
    """Estimated as `text_bytes` is."""
    bad_fraction: float
    """Share of unusable files, or of unusable documents, among those that were read: the larger of the two."""
    bad_reason: str
    """The most frequent reason for it; empty if there is none."""

    def warning(self, max_bad_fraction: float) -> str | None:
        """Return a sentence if the source has more unusable documents or files than `data.max_bad_fraction` allows."""
        if self.bad_fraction <= max_bad_fraction:
            return None
        return (
            f"about {100 * self.bad_fraction:.2g} % of its documents or files (by a sample) cannot be used "
            f"({self.bad_reason}), and above data.max_bad_fraction={max_bad_fraction:g} preparation fails; repair or "
            "remove them, or raise it"
        )


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
        vocab_size = parse(import_tokenizer(tok.path, tok.lowercase, data.holds_pairs)).vocab_size
        vocab_size += tok.add_words + len(tok.added_tokens)
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
    """Extrapolate from the beginnings of files of all sizes, the median one first."""
    size = sum(file.size for file in files)
    readable = sorted((file for file in files if file.size and not file.problem), key=lambda file: file.size)
    count = min(len(readable), _SAMPLED_FILES)
    chosen = [readable[(2 * number + 1) * len(readable) // (2 * count)] for number in range(count)]
    sample = _Sample()
    for file in sorted(chosen, key=lambda file: abs(file.size - chosen[count // 2].size)):
        if sample.text_bytes >= _SAMPLED_BYTES:
            break
        sample.add(file)
    text = sample.text_bytes / max(sample.read_bytes, 1) * size
    documents = sample.documents / max(sample.read_bytes, 1) * size
    if text and all(file.format == "txt" and file.documents == "file" for file in readable):
        documents = len(readable)
    bytes_on_disk = sum(file.bytes for file in files)
    bad = max(
        sample.bad_files / max(sample.files, 1), sample.bad_documents / max(sample.documents + sample.bad_documents, 1)
    )
    reason = sample.reasons.most_common(1)[0][0] if sample.reasons else ""
    return SourceForecast(path, len(list(with_targets(files))), bytes_on_disk, int(text), int(documents), bad, reason)


@dataclass
class _Sample:
    """Counts what was read of some files."""

    files: int = 0
    bad_files: int = 0
    read_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    bad_documents: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, file: InputFile) -> None:
        """Read a file from its beginning on until the sample has `_SAMPLED_BYTES` of text."""
        file_range = FileRange(file, 0, min(file.size, _SAMPLED_BYTES) if file.is_splittable else file.size)
        self.files += 1
        try:
            with FileReader(file) as reader:
                for document in read_open_range(file_range, reader):
                    if isinstance(document, BadDocument):
                        self.bad_documents += 1
                        self.reasons[document.reason] += 1
                        continue
                    sides = (document,) if isinstance(document, str) else document
                    self.text_bytes += sum(len(side.encode(errors="replace")) for side in sides)
                    self.documents += 1
                    if self.text_bytes > _SAMPLED_BYTES:
                        break
                is_read = file.is_splittable and self.text_bytes <= _SAMPLED_BYTES
                self.read_bytes += int(file_range.stop if is_read else reader.max_offset)
        except UnreadableFileError as error:
            self.bad_files += 1
            self.read_bytes += file.size
            self.reasons[str(error)] += 1
