"""The recipe's `data` and `tokenizer` sections."""

import os
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from multihop.common.config import COMPATIBILITY, DATA, ORDER, Section
from multihop.common.errors import UserError


def _is_default(value: Any) -> bool:
    # Such a key is written only where it is set, so that older data sets, prepared without it, keep their hash.
    return value is None or value is False


class PairFields(Section):
    """The fields or columns of the two sides of a pair."""

    source: int | str
    """Name of a field; for .tsv files, number of a column, from 1."""
    target: int | str
    relation: int | str | None = Field(default=None, exclude_if=_is_default)
    """The relation of triples, of which `source` is the head and `target` the tail: a source is read as "head
    <relation>"; null: there is none."""

    @model_validator(mode="after")
    def _are_two_of_a_kind(self) -> "PairFields":
        sides = f"source={self.source}, target={self.target}"
        if self.relation is not None:
            sides += f", relation={self.relation}"
        if len({isinstance(side, int) for side in self.sides}) > 1:
            raise UserError(f"{sides}: expected two names of fields, or two column numbers for .tsv files")
        if any(isinstance(side, int) and side < 1 for side in self.sides):
            raise UserError(f"{sides}: columns are counted from 1")
        if len(set(self.sides)) < len(self.sides):
            raise UserError(f"{sides}: expected two different fields, one for each side of a pair")
        return self

    @property
    def sides(self) -> tuple[int | str, ...]:
        """Source and target, and the relation of triples."""
        return (self.source, self.target) if self.relation is None else (self.source, self.target, self.relation)

    @property
    def are_columns(self) -> bool:
        """True for columns of .tsv files, false for fields."""
        return isinstance(self.source, int)


_COLUMNS = PairFields(source=1, target=2)
LEAST_VOCABULARY = 64
"""The smallest vocabulary that can be trained."""


class Source(Section):
    """Files with documents, or with pairs of sentences for translation."""

    path: Annotated[str, DATA]
    """A file, a directory or a glob, local or at s3://BUCKET/… or gs://BUCKET/…; one file at http:// or https://; or
    `package:NAME/INNER/GLOB`, files of an installed Python package."""
    field: Annotated[str, DATA] = "text"
    """Name of the text field in .jsonl, .json, .parquet and .arrow files."""
    fields: Annotated[PairFields | None, DATA] = Field(default=None, exclude_if=_is_default)
    """The two text fields of pairs, or the two columns of .tsv files; null: the source has documents, or columns 1 and
    2 of .tsv files."""
    target_path: Annotated[str | None, DATA] = Field(default=None, exclude_if=_is_default)
    """The file whose line i translates line i of `path`, for pairs in two line files."""
    documents: Annotated[Literal["file", "line", "block"], DATA] = "file"
    """A document of a .txt file: the whole file, each line, or each block between blank lines."""
    language: Annotated[str, DATA] = Field(default="en", pattern="^[a-z]{2,3}(-[a-z]+)*$")
    """ISO 639 code of the rules for ends of sentences; a language without rules uses those of a close one, or of
    English."""
    weight: Annotated[float | None, ORDER] = Field(default=None, gt=0.0)
    """Share of the training samples, relative to the other sources' weights; null: proportional to its size."""

    @property
    def pair_fields(self) -> PairFields | None:
        """`fields`, with the default of .tsv files."""
        if self.fields is None and self.target_path is None and _is_tsv(self.path):
            return _COLUMNS
        return self.fields

    @property
    def holds_pairs(self) -> bool:
        """True if the source has pairs, not documents."""
        return self.target_path is not None or self.pair_fields is not None

    @model_validator(mode="after")
    def _is_of_pairs_or_of_documents(self) -> "Source":
        if self.target_path is not None and self.fields is not None:
            raise UserError(
                f"target_path={self.target_path} is for two line files, and fields for files that hold both sides; "
                "remove one of them"
            )
        if self.target_path == self.path:
            raise UserError(f"target_path={self.target_path} is the file of path; give the file of the other side")
        if self.fields is not None and not self.fields.are_columns and _is_tsv(self.path):
            raise UserError(
                f"fields has source={self.fields.source}, but {self.path} is a .tsv file; give numbers of columns, "
                "for example {source: 1, target: 2}"
            )
        if self.holds_pairs:
            for name, why in (
                ("field", "each side has its own field; set fields={source: …, target: …}"),
                ("documents", "a pair is a line or a row; remove it"),
                ("language", "sides of pairs are not split into sentences; remove it"),
            ):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise UserError(f"{name}={getattr(self, name)} is for documents, but the source has pairs: {why}")
        return self


def _is_tsv(path: str) -> bool:
    return os.path.basename(path).lower().endswith((".tsv", ".tsv.gz", ".tsv.zst", ".tsv.bz2", ".tsv.xz"))


class CleanConfig(Section):
    """Optional steps of cleaning, besides Unicode and whitespace normalization."""

    fix_mojibake: bool = False
    """Repair text that was decoded with the wrong encoding ("schÃ¶n"); needs ftfy (pip install 'multihop[text]')."""


class LanguageFilter(Section):
    """Drop documents in other languages; needs py3langid (pip install 'multihop[text]')."""

    keep: list[str] = Field(min_length=1)
    """Codes of the languages to keep: ISO 639-1 if there is one, else ISO 639-3."""
    min_score: float = Field(default=0.5, ge=0.0, le=1.0)
    """Also drop documents whose language has a lower probability."""


def _nfc(word: str) -> str:
    """Return the NFC form, in which filters see documents."""
    return unicodedata.normalize("NFC", word)


_Share = Annotated[float, Field(ge=0.0, le=1.0)] | None


class GopherQuality(Section):
    """The rules of Rae et al. 2021 (arXiv:2112.11446), section A.1.1, "Quality filtering". null disables a rule."""

    min_words: int | None = Field(default=50, ge=1)
    max_words: int | None = Field(default=100_000, ge=1)
    min_mean_word_length: float | None = Field(default=3.0, ge=0.0)
    """Minimum mean length of the words, in characters."""
    max_mean_word_length: float | None = Field(default=10.0, ge=0.0)
    """Maximum mean length of the words, in characters."""
    max_hashes: float | None = Field(default=0.1, ge=0.0)
    """Maximum "#" per word."""
    max_ellipses: float | None = Field(default=0.1, ge=0.0)
    """Maximum "..." or "…" per word."""
    max_bullet_lines: _Share = 0.9
    """Maximum share of the lines that start with a bullet point."""
    max_ellipsis_lines: _Share = 0.3
    """Maximum share of the lines that end with an ellipsis."""
    min_alphabetic_words: _Share = 0.8
    """Minimum share of the words with an alphabetic character."""
    min_stop_words: int | None = Field(default=2, ge=1)
    """Minimum number of different `stop_words` that occur."""
    stop_words: list[Annotated[str, AfterValidator(_nfc)]] = Field(
        default=["the", "be", "to", "of", "and", "that", "have", "with"]
    )
    """Words that `min_stop_words` counts, English by default.

    For another language, set other words, or `min_stop_words` to null.
    """


class GopherRepetition(Section):
    """The rules of Rae et al. 2021 (arXiv:2112.11446), section A.1.1, "Repetition removal", and table A1.

    null disables a rule.
    """

    max_duplicate_lines: _Share = 0.30
    """Maximum share of the lines that repeat an earlier line."""
    max_duplicate_paragraphs: _Share = 0.30
    max_duplicate_line_characters: _Share = 0.20
    """Maximum share of the characters in duplicate lines."""
    max_duplicate_paragraph_characters: _Share = 0.20
    max_top_2gram: _Share = 0.20
    """Maximum share of the words' characters in the most frequent 2-gram."""
    max_top_3gram: _Share = 0.18
    max_top_4gram: _Share = 0.16
    max_duplicate_5gram: _Share = 0.15
    """Maximum share of the words' characters in 5-grams that occurred before in the document."""
    max_duplicate_6gram: _Share = 0.14
    max_duplicate_7gram: _Share = 0.13
    max_duplicate_8gram: _Share = 0.12
    max_duplicate_9gram: _Share = 0.11
    max_duplicate_10gram: _Share = 0.10


class C4(Section):
    """The rules of Raffel et al. 2020 (arXiv:1910.10683), section 2.2.

    The first five remove lines or markers; the others drop documents.
    """

    citations: bool = True
    """Remove markers such as [1], [edit] and [citation needed]."""
    terminal_punctuation: bool = True
    """Remove lines that do not end in . ? ! or a quotation mark, or that end in an ellipsis."""
    min_line_words: int | None = Field(default=5, ge=1)
    """Remove lines with fewer words."""
    javascript: bool = True
    """Remove lines with the word "javascript"."""
    policy: bool = True
    """Remove lines about terms of use, privacy and cookies."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents with "{"."""
    min_sentences: int | None = Field(default=3, ge=1)
    """Drop documents with fewer sentences left."""
    bad_words: str | None = None
    """Drop documents with a word or phrase of this UTF-8 text file, which has one on each line."""


class PairLanguages(Section):
    """Drop pairs with a side in another language; needs py3langid (pip install 'multihop[text]')."""

    source: str
    """ISO 639-1 code if there is one, else ISO 639-3."""
    target: str
    min_score: float = Field(default=0.5, ge=0.0, le=1.0)
    """Drop a pair only if the other language has at least this probability: a side of a few words may be of any."""


class PairFilters(Section):
    """The rules of Moses' clean-corpus-n.perl (Koehn et al. 2007) with its defaults and its manual's limits of 1 and 80
    words, and a rule against equal sides. null disables a rule."""

    min_words: int | None = Field(default=1, ge=1)
    """Minimum words of each side."""
    max_words: int | None = Field(default=80, ge=1)
    """Maximum words of each side."""
    max_ratio: float | None = Field(default=9.0, ge=1.0)
    """Maximum words of the longer side per word of the shorter."""
    max_word_length: int | None = Field(default=1000, ge=1)
    """Maximum characters of a word."""
    drop_equal: bool = True
    """Drop pairs whose sides are equal."""
    languages: PairLanguages | None = None
    """Languages of the two sides; null: do not identify them."""


class FilterConfig(Section):
    """Groups of filters. A group is off unless the recipe sets it; `{}` enables it with its published values."""

    pairs: PairFilters | None = Field(default=None, exclude_if=_is_default)
    """The only group for pairs; the others are for documents."""

    c4: C4 | None = None
    language: LanguageFilter | None = None
    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None


class NearDuplicatesConfig(Section):
    """Drop documents that share most of their word n-grams with another; one document per cluster is kept."""

    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    """Minimum Jaccard similarity of two documents' sets of shingles."""
    shingle_words: int = Field(default=5, ge=1, le=64)
    """Words of a shingle (a word n-gram)."""
    permutations: int = Field(default=128, ge=16, le=1024, multiple_of=8)
    """Length of the MinHash signature, in bytes on disk: the estimate's standard deviation is at most the square root
    of J (1 - J) / permutations."""
    bands: int | None = Field(default=None, ge=1)
    """LSH bands: two documents are compared if one band of their signatures is equal; null: the fewest that find 98 %
    of the pairs at the threshold."""

    @model_validator(mode="after")
    def _a_band_has_a_row(self) -> "NearDuplicatesConfig":
        if self.bands is not None and self.bands > self.permutations:
            raise UserError(
                f"data.near_duplicates.bands={self.bands} is more than permutations={self.permutations}; "
                "each band needs at least one"
            )
        return self


class DecontaminateConfig(Section):
    """Remove what training documents share with evaluation texts."""

    against: list[str] = Field(min_length=1)
    """Files of evaluation texts, or globs: .txt with one text per line, .jsonl with a text in `field` of each line."""
    field: str | list[str] = "text"
    """Name of the text field in .jsonl files; of several fields, as the sides of pairs have, each text counts."""
    ngram: int = Field(default=13, ge=2, le=64)
    """Consecutive words that a document and an evaluation text must share; a shorter text must be contained whole, and
    is ignored below 8 words."""
    action: Literal["drop", "cut"] = "drop"
    """drop: drop the document; cut: remove the overlap and 200 characters on both sides, as GPT-3 did."""
    common: int | None = Field(default=10, ge=1)
    """An n-gram in more training documents than this counts as a common phrase and is ignored, as GPT-3 did; null: no
    n-gram is ignored."""


class DataConfig(Section):
    """The recipe's `data` section: sources, filters and the held-out share."""

    sources: list[Source] = Field(min_length=1)
    clean: Annotated[CleanConfig, DATA] = CleanConfig()
    filters: Annotated[FilterConfig, DATA] = FilterConfig()
    heldout_fraction: Annotated[float, DATA] = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the documents held out from training, chosen by a hash of the document."""
    max_bad_fraction: Annotated[float, DATA] = Field(default=0.01, ge=0.0, le=1.0)
    """Maximum share of unreadable files, or of unreadable documents; beyond it preparation fails."""
    near_duplicates: Annotated[NearDuplicatesConfig | None, DATA] = None
    """Removal of near duplicates; null: drop only exact copies."""
    decontaminate: Annotated[DecontaminateConfig | None, DATA] = None
    """Removal of evaluation texts; null: do not compare with them."""
    shuffle_window_shards: Annotated[int | None, ORDER] = Field(default=None, ge=1, exclude_if=_is_default)
    """Shuffle within windows of this many shards (256 MiB each); null: over all shards. With it, nodes that share only
    an object store fetch shards during training."""

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> "DataConfig":
        without = [number for number, source in enumerate(self.sources) if source.weight is None]
        if without and len(without) < len(self.sources):
            raise UserError(
                f"data.sources[{without[0]}].weight is missing, but other sources have one; "
                "give every source a weight, or none"
            )
        return self

    @property
    def holds_pairs(self) -> bool:
        """True if the sources have pairs, not documents."""
        return self.sources[0].holds_pairs

    @model_validator(mode="after")
    def _all_have_pairs_or_none(self) -> "DataConfig":
        kinds = [source.holds_pairs for source in self.sources]
        if len(set(kinds)) > 1:
            pairs, documents = kinds.index(True), kinds.index(False)
            raise UserError(
                f"data.sources[{pairs}] has pairs and data.sources[{documents}] has documents; give every source "
                "fields={source: …, target: …} or target_path, or none"
            )
        groups = [name for name in FilterConfig.model_fields if getattr(self.filters, name) is not None]
        if not self.holds_pairs and "pairs" in groups:
            raise UserError(
                "data.filters.pairs is set, but data.sources have documents; remove it, or give the sources "
                "fields={source: …, target: …} or target_path"
            )
        if self.holds_pairs:
            if others := [name for name in groups if name != "pairs"]:
                instead = "data.filters.pairs.languages" if others[0] == "language" else "data.filters.pairs"
                raise UserError(
                    f"data.filters.{others[0]} is for documents, but data.sources have pairs; use {instead}"
                )
            if self.decontaminate is not None and self.decontaminate.action != "drop":
                raise UserError(
                    f"data.decontaminate.action={self.decontaminate.action} would cut one side of a pair; set drop"
                )
        return self


class TokenizerConfig(Section):
    """The recipe's `tokenizer` section: an existing tokenizer, or a SentencePiece model trained on the documents."""

    path: Annotated[str | None, DATA | COMPATIBILITY] = None
    """An existing tokenizer: a SentencePiece .model, a BERT vocab.txt, a directory with GPT-2's vocab.json and
    merges.txt, or a tokenizer.json of BERT's or GPT-2's kind. Of the other keys only `lowercase`, `added_tokens` and
    `add_words` may be set then, and with the latter `sample_mb`."""
    add_words: Annotated[int, DATA | COMPATIBILITY] = Field(default=0, ge=0, le=10**6, exclude_if=lambda n: n == 0)
    """Number of words of the sample that are added to the existing tokenizer, as its last tokens: those on which it
    spends the most tokens."""
    added_tokens: Annotated[list[str], DATA | COMPATIBILITY] = Field(
        default_factory=list, exclude_if=lambda tokens: not tokens
    )
    """Tokens that texts match exactly, such as <is_a>, and that are never split: part of the `vocab_size` tokens of a
    trained tokenizer, or added to an existing one as its last tokens."""
    lowercase: Annotated[bool, DATA | COMPATIBILITY] = True
    """Lower-case text and strip accents, as BERT-uncased does; only for a vocab.txt."""
    kind: Annotated[Literal["unigram", "bpe", "char"], DATA | COMPATIBILITY] = "unigram"
    """What a trained tokenizer is: unigram (Kudo 2018), bpe (Sennrich et al. 2016), or char: a token for each
    character."""
    vocab_size: Annotated[int, DATA | COMPATIBILITY] = Field(default=16_000, ge=LEAST_VOCABULARY, le=2**31 - 1)
    """Number of tokens, special tokens included; char: the maximum number."""
    special_tokens: Annotated[Literal["bert", "albert", "gpt2", "t5"], DATA | COMPATIBILITY] = "bert"
    """bert: [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4; albert: <pad> <unk> [CLS] [SEP] [MASK] as ids 0 to 4;
    gpt2: <|endoftext|> and <unk> as ids 0 and 1; t5, for pairs: <pad> </s> <unk> as ids 0 to 2; for pairs that causal
    models complete: gpt2."""
    separate_vocabularies: Annotated[bool, DATA | COMPATIBILITY] = Field(default=False, exclude_if=_is_default)
    """Train a tokenizer of `vocab_size` for each side of pairs, not one for both."""
    byte_fallback: Annotated[bool, DATA | COMPATIBILITY] = False
    """Encode a character without a token as its UTF-8 bytes, which take 256 tokens of the vocabulary, not as <unk>."""
    sample_mb: Annotated[float, DATA | COMPATIBILITY] = Field(default=100.0, gt=0)
    """Megabytes of text to train on, or to take `add_words` from: the documents with the smallest hashes."""
    threads: Annotated[int, DATA | COMPATIBILITY] = Field(default=2, ge=1, le=128)
    """Training threads. Part of the recipe because unigram scores change with their number."""

    @model_validator(mode="after")
    def _is_given_or_trained(self) -> "TokenizerConfig":
        fields = TokenizerConfig.model_fields
        changed = [
            name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        ]
        for token in self.added_tokens:
            if not token or any(map(str.isspace, token)) or token != _nfc(token):
                raise UserError(
                    f"tokenizer.added_tokens has {token!r}, which no text has after cleaning; give tokens without "
                    "spaces, in Unicode's form NFC"
                )
            if self.added_tokens.count(token) > 1:
                raise UserError(f"tokenizer.added_tokens has {token!r} twice; remove one")
        if self.added_tokens and self.add_words:
            raise UserError(
                f"tokenizer.add_words={self.add_words} and tokenizer.added_tokens both add tokens; remove one of them"
            )
        if self.path is None:
            if self.add_words:
                raise UserError(
                    f"tokenizer.add_words={self.add_words} adds words to an existing tokenizer; give it as "
                    "tokenizer.path, or raise tokenizer.vocab_size instead"
                )
            if not self.lowercase:
                raise UserError("tokenizer.lowercase=false is for an existing vocab.txt; give it as tokenizer.path")
        elif trained := [name for name in changed if name not in self._keys_of_existing]:
            raise UserError(
                f"tokenizer.{trained[0]} is a setting of training, but tokenizer.path={self.path} is already trained; "
                "remove one of them"
            )
        return self

    @property
    def is_from_sample(self) -> bool:
        """True if the tokenizer depends on the text: it is trained, or words are added."""
        return self.path is None or self.add_words > 0

    @property
    def _keys_of_existing(self) -> set[str]:
        return {"path", "lowercase", "add_words", "added_tokens", *(["sample_mb"] if self.add_words else [])}


def check_tokenizer(data: DataConfig, tok: TokenizerConfig) -> None:
    """Raise UserError where the tokenizer's settings do not suit the sources' pairs or documents."""
    if tok.separate_vocabularies and not data.holds_pairs:
        raise UserError("tokenizer.separate_vocabularies=true is for pairs, but data.sources have documents; remove it")
    if tok.add_words and data.holds_pairs:
        raise UserError(f"tokenizer.add_words={tok.add_words} is for documents, but data.sources have pairs; remove it")
    if data.holds_pairs and tok.path is None and tok.special_tokens not in ("t5", "gpt2"):
        raise UserError(
            f"tokenizer.special_tokens={tok.special_tokens} lacks tokens that pairs need; set "
            "tokenizer.special_tokens=t5, or gpt2 for objective.name=completion"
        )
