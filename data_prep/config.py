"""The recipe's `data` and `tokenizer` sections."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of a recipe: every key is known, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Files of one kind that hold documents."""

    path: str
    """A file, a folder or a glob, here or at s3://BUCKET/… or gs://BUCKET/…; http:// or https:// and one file;
    `package:NAME/INNER/GLOB` names files of an installed Python package."""
    field: str = "text"
    """The name of the text's field in .jsonl, .json, .parquet and .arrow files."""
    documents: Literal["file", "line", "block"] = "file"
    """What is a document in .txt files: the whole file, each line, or each block between blank lines."""
    weight: float | None = Field(default=None, gt=0.0)
    """Its part of the training samples, relative to the other sources' weights; null: as much as it has of them."""


class DataConfig(Section):
    """What is read, and what is held out."""

    sources: list[Source] = Field(min_length=1)
    heldout_fraction: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the documents kept out of training, chosen by a hash of the document."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of files or of documents that may be unreadable before preparation fails."""

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
