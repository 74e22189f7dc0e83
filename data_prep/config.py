"""The recipe's `data` and `tokenizer` sections."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of a recipe: every key is known, every number finite (JSON has no others), and nothing changes after
    validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(Section):
    """Files of one kind that hold documents."""

    path: str
    """A file, a folder or a glob, here or at s3://BUCKET/… or gs://BUCKET/…; http:// or https:// and one file;
    `package:NAME/INNER/GLOB` names files of an installed Python package."""
    field: str = "text"
    """The name of the text's field in .jsonl, .json, .parquet and .arrow files."""
    documents: Literal["file", "line", "block"] = "file"
    """What is a document in .txt files: the whole file, each line, or each block between blank lines."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}(-[a-z]+)*$")
    """ISO 639 code whose rules end sentences; a language without rules of its own has those of a close one, or
    English ones."""
    weight: float | None = Field(default=None, gt=0.0)
    """Its part of the training samples, relative to the other sources' weights; null: as much as it has of them."""


class CleanConfig(Section):
    """What is done to a text besides giving it one spelling."""

    fix_mojibake: bool = False
    """Repair text that was decoded with the wrong encoding ("schÃ¶n"), by ftfy (pip install 'multihop[text]')."""


class LanguageFilter(Section):
    """Documents in other languages are dropped, by py3langid (pip install 'multihop[text]')."""

    keep: list[str] = Field(min_length=1)
    """Codes of the languages that stay: ISO 639-1 where there is one, else ISO 639-3."""
    min_score: float = Field(default=0.5, ge=0.0, le=1.0)
    """Documents whose language is less probable than this are dropped too."""


_Share = Annotated[float, Field(ge=0.0, le=1.0)] | None


class GopherQuality(Section):
    """Rae et al. 2021 (arXiv:2112.11446), section A.1.1, "Quality filtering". null switches a rule off."""

    min_words: int | None = Field(default=50, ge=1)
    max_words: int | None = Field(default=100_000, ge=1)
    min_mean_word_length: float | None = Field(default=3.0, ge=0.0)
    """Characters."""
    max_mean_word_length: float | None = Field(default=10.0, ge=0.0)
    """Characters."""
    max_hashes: float | None = Field(default=0.1, ge=0.0)
    """"#" for each word."""
    max_ellipses: float | None = Field(default=0.1, ge=0.0)
    """"..." or "…" for each word."""
    max_bullet_lines: _Share = 0.9
    """Share of the lines that start with a bullet point."""
    max_ellipsis_lines: _Share = 0.3
    """Share of the lines that end with an ellipsis."""
    min_alphabetic_words: _Share = 0.8
    """Share of the words that hold an alphabetic character."""
    min_stop_words: int | None = Field(default=2, ge=1)
    """How many of `stop_words` occur at least once."""
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]
    """English; null in `min_stop_words`, or words of its own, for another language."""


class GopherRepetition(Section):
    """Rae et al. 2021 (arXiv:2112.11446), section A.1.1, "Repetition removal", and table A1. null: a rule is off."""

    max_duplicate_lines: _Share = 0.30
    """Share of the lines that stood before in the document."""
    max_duplicate_paragraphs: _Share = 0.30
    max_duplicate_line_characters: _Share = 0.20
    """Share of the characters that stand in duplicate lines."""
    max_duplicate_paragraph_characters: _Share = 0.20
    max_top_2gram: _Share = 0.20
    """Share of the words' characters that stand in the most frequent pair of words."""
    max_top_3gram: _Share = 0.18
    max_top_4gram: _Share = 0.16
    max_duplicate_5gram: _Share = 0.15
    """Share of the words' characters that stand in five words that stood before in the document."""
    max_duplicate_6gram: _Share = 0.14
    max_duplicate_7gram: _Share = 0.13
    max_duplicate_8gram: _Share = 0.12
    max_duplicate_9gram: _Share = 0.11
    max_duplicate_10gram: _Share = 0.10


class C4(Section):
    """Raffel et al. 2020 (arXiv:1910.10683), section 2.2. The first five cut lines, or pieces of them; the rest drop
    documents."""

    citations: bool = True
    """Cut markers such as [1], [edit] and [citation needed]."""
    terminal_punctuation: bool = True
    """Cut lines that do not end in . ? ! or a quotation mark, or that end in an ellipsis."""
    min_line_words: int | None = Field(default=5, ge=1)
    """Cut lines of fewer words."""
    javascript: bool = True
    """Cut lines that hold the word "javascript"."""
    policy: bool = True
    """Cut lines about terms of use, privacy and cookies."""
    lorem_ipsum: bool = True
    """Drop documents that hold "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents that hold "{"."""
    min_sentences: int | None = Field(default=3, ge=1)
    """Drop documents that keep fewer sentences."""
    bad_words: str | None = None
    """A UTF-8 text file with a word or phrase a line: drop documents that hold one of them."""


class FilterConfig(Section):
    """Which documents are kept: no rule unless its group is named; `{}` switches a group on as it was published."""

    c4: C4 | None = None
    language: LanguageFilter | None = None
    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None


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
    clean: CleanConfig = CleanConfig()
    filters: FilterConfig = FilterConfig()
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
