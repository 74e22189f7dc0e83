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
    """The tokenizer: an existing one, or a SentencePiece model that is trained on the documents."""

    path: str | None = None
    """An existing one instead of training: a SentencePiece .model, a BERT vocab.txt, a folder with GPT-2's vocab.json
    and merges.txt, or a tokenizer.json of BERT's or GPT-2's kind. The other keys but `lowercase` are not set then."""
    lowercase: bool = True
    """Of a vocab.txt: small letters without accents, as BERT-uncased has them."""
    kind: Literal["unigram", "bpe"] = "unigram"
    vocab_size: int = Field(default=16_000, ge=64, le=2**31 - 1)
    """Pieces, the special ones included."""
    special_pieces: Literal["bert", "albert", "gpt2"] = "bert"
    """bert: [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4; albert: <pad> <unk> [CLS] [SEP] [MASK] as ids 0 to 4;
    gpt2: <|endoftext|> and <unk> as ids 0 and 1."""
    byte_fallback: bool = False
    """A character without a piece becomes the pieces of its UTF-8 bytes, 256 of the vocabulary, instead of <unk>."""
    sample_mb: float = Field(default=100.0, gt=0)
    """Megabytes of text it is trained on: the documents with the smallest hashes."""
    threads: int = Field(default=2, ge=1, le=128)
    """Training threads. Part of the recipe because unigram scores change with their number."""

    @model_validator(mode="after")
    def _is_given_or_trained(self) -> "TokenizerConfig":
        fields = TokenizerConfig.model_fields
        changed = [name for name in fields if name != "path" and getattr(self, name) != fields[name].default]
        if self.path is None:
            if not self.lowercase:
                raise ValueError("tokenizer.lowercase=false is for an existing vocab.txt; give it as tokenizer.path")
        elif trained := [name for name in changed if name != "lowercase"]:
            raise ValueError(
                f"tokenizer.{trained[0]} is a setting of training, and tokenizer.path={self.path} is trained already; "
                "leave one of them out"
            )
        return self
