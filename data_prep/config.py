"""The recipe's `data` and `tokenizer` sections."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of a recipe: every key is known, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Files of one kind that hold documents."""

    path: str
    """A file, a folder or a glob; `package:NAME/INNER/GLOB` names files of an installed Python package."""
    field: str = "text"
    """The name of the text's field in .jsonl, .json and .parquet files."""
    weight: float | None = Field(default=None, gt=0.0)
    """Its part of the training samples, relative to the other sources' weights; null: as much as it has of them."""


class NearDuplicatesConfig(Section):
    """Documents that share most of their word sequences with another are dropped; one of each cluster is kept."""

    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    """Jaccard similarity of two documents' shingles from which on they are near duplicates."""
    shingle_words: int = Field(default=5, ge=1, le=64)
    """Words in a row that make a shingle."""
    permutations: int = Field(default=128, ge=16, le=1024, multiple_of=8)
    """Values of a document's MinHash signature, a byte each on the disk: the estimate's standard deviation is at most
    the square root of J (1 - J) / permutations."""
    bands: int | None = Field(default=None, ge=1)
    """Parts of the signature of which one must be equal for two documents to be compared; null: as few as find 98 %
    of the pairs at the threshold."""

    @model_validator(mode="after")
    def _a_band_has_a_row(self) -> "NearDuplicatesConfig":
        if self.bands is not None and self.bands > self.permutations:
            raise ValueError(
                f"data.near_duplicates.bands={self.bands} is more than permutations={self.permutations}; "
                "a band takes one of them at least"
            )
        return self


class DecontaminateConfig(Section):
    """What training documents share with evaluation texts is taken out."""

    against: list[str] = Field(min_length=1)
    """Files of evaluation texts, or globs: .txt with a text a line, .jsonl with a text in `field` of each line."""
    field: str = "text"
    """The name of the text's field in .jsonl files."""
    ngram: int = Field(default=13, ge=2, le=64)
    """Words in a row that a document and an evaluation text must share; a shorter text must be shared whole, and is
    left alone below 8 words."""
    action: Literal["drop", "cut"] = "drop"
    """drop: the document; cut: what is shared and 200 characters on both sides, as GPT-3 did."""
    common: int | None = Field(default=10, ge=1)
    """An n-gram that stands in more training documents than this is taken for a common phrase and left alone, as GPT-3
    did; null: none is."""


class DataConfig(Section):
    """What is read, and what is held out."""

    sources: list[Source] = Field(min_length=1)
    heldout_fraction: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the documents kept out of training, chosen by a hash of the document."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of files or of documents that may be unreadable before preparation fails."""
    near_duplicates: NearDuplicatesConfig | None = None
    """null: only exact copies are dropped."""
    decontaminate: DecontaminateConfig | None = None
    """null: nothing is compared with evaluation texts."""

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> "DataConfig":
        without = [number for number, source in enumerate(self.sources) if source.weight is None]
        if without and len(without) < len(self.sources):
            raise ValueError(
                f"data.sources[{without[0]}].weight is missing, and other sources have one; "
                "give every source a weight, or none"
            )
        return self


class TokenizerConfig(Section):
    """The SentencePiece model that is trained on the documents."""

    kind: Literal["unigram", "bpe"] = "unigram"
    vocab_size: int = Field(default=16_000, ge=64, le=2**31 - 1)
    """Pieces, the special ones included."""
    special_pieces: Literal["bert", "gpt2"] = "bert"
    """bert: [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4; gpt2: <|endoftext|> and <unk> as ids 0 and 1."""
    sample_mb: float = Field(default=100.0, gt=0)
    """Megabytes of text it is trained on: the documents with the smallest hashes."""
    threads: int = Field(default=2, ge=1, le=128)
    """Training threads. Part of the recipe because unigram scores change with their number."""
