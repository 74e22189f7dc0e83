"""Task examples as arrays of tokens: packed, and cheap to map from a file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.finetune.document_context import around, contexts
from multihop.eval.finetune.templates import Template
from multihop.eval.tasks.task import Example, Kind
from multihop.pretrain.objectives.batch import ModelInput
from multihop.pretrain.packed_tokens import cumulative_lengths, pack, positions_in

_POOL_BATCHES = 16


@dataclass(frozen=True)
class Encoded:
    """E examples as S sequences of N tokens in all. An example is one sequence, or one for each of its choices."""

    ids: NDArray[np.int32]
    """(N,)"""
    cu_seqlens: NDArray[np.int64]
    """(S + 1,), cumulative sequence lengths, from 0 to N."""
    second_starts: NDArray[np.int32]
    """(S,), the index in its sequence at which the second text begins; the sequence's length without a second text."""
    cu_examples: NDArray[np.int64]
    """(E + 1,), cumulative numbers of sequences, from 0 to S."""
    words: NDArray[np.int32]
    """(W,), index in its sequence of the token at which each word is labeled (`Template.reads_last`), without the words
    that were cut off; empty unless tagging."""
    cu_words: NDArray[np.int64]
    """(S + 1,), cumulative numbers of words."""
    targets: NDArray[np.float64]
    """(T,), for tagging one per word, those that were cut off included."""
    cu_targets: NDArray[np.int64]
    """(E + 1,), cumulative numbers of targets."""

    def __len__(self) -> int:
        return len(self.cu_examples) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (E,): the tokens of each example."""
        return np.diff(self.cu_seqlens[self.cu_examples])

    def targets_of(self, example: int) -> NDArray[np.float64]:
        """Return the targets of one example."""
        return self.targets[self.cu_targets[example] : self.cu_targets[example + 1]]

    def labels_of(self, batch: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the targets of a batch in the order of the model's outputs: of words, only those that were not cut
        off."""
        if not len(self.words):
            return np.concatenate([self.targets_of(i) for i in batch])
        kept = np.diff(self.cu_words[self.cu_examples])
        return np.concatenate([self.targets_of(i)[: kept[i]] for i in batch])

    def collate(self, batch: Sequence[int] | NDArray[np.int64]) -> dict[str, ModelInput]:
        """Return a model's inputs: the examples' sequences, packed.

        Returns:
            packed: PackedTokens, with token types; words: int64 (W,), where each word is labeled among the N tokens;
            cu_examples: int64 (examples + 1,).
        """
        sequences = np.concatenate([np.arange(self.cu_examples[i], self.cu_examples[i + 1]) for i in batch])
        starts, stops = self.cu_seqlens[sequences], self.cu_seqlens[sequences + 1]
        cu_seqlens = cumulative_lengths(stops - starts)
        token_type_ids = positions_in(cu_seqlens) >= np.repeat(self.second_starts[sequences], stops - starts)
        words = [
            self.words[self.cu_words[s] : self.cu_words[s + 1]] + at
            for s, at in zip(sequences, cu_seqlens[:-1], strict=True)
        ]
        input_ids = np.concatenate([self.ids[a:b] for a, b in zip(starts, stops, strict=True)]).astype(np.int64)
        return {
            "packed": pack(input_ids, cu_seqlens, token_type_ids.astype(np.int64)),
            "words": np.concatenate(words).astype(np.int64),
            "cu_examples": np.cumsum([0, *(self.cu_examples[i + 1] - self.cu_examples[i] for i in batch)]),
        }

    def save(self, folder: Path) -> None:
        """Write each array to a file of its own in a new folder."""
        folder.mkdir()
        for each in fields(self):
            np.save(folder / f"{each.name}.npy", getattr(self, each.name))

    @staticmethod
    def load(folder: Path) -> "Encoded":
        """Map the arrays that `save` wrote, without reading them."""
        arrays: dict[str, Any] = {
            # As a plain array: each slice of a memmap costs microseconds more.
            each.name: np.load(folder / f"{each.name}.npy", mmap_mode="r").view(np.ndarray)
            for each in fields(Encoded)
        }
        return Encoded(**arrays)


def encode(
    examples: Sequence[Example],
    kind: Kind,
    tokenizer: Tokenizer,
    template: Template,
    seq_len: int,
    both_orders: bool = False,
    document_context: Sequence[Example] = (),
) -> Encoded:
    """Encode examples as tokens, truncated to `seq_len`, special tokens included.

    Of a pair the longer text is truncated first (Devlin et al. 2018, in the published code); of a choice the context.

    Args:
        both_orders: give each pair in both orders, as a causal model reads texts without an order (Radford et al. 2018,
            section 3.3).
        document_context: tagging: all sentences of the documents that the examples are from, with which their sequences
            are filled up to `seq_len`; empty: a sequence has one sentence.
    """
    rows = _Rows()
    if kind == "tagging":
        sentences = _sentences(examples, tokenizer, template)
        sides = contexts(
            examples,
            document_context,
            lambda part: [np.concatenate(words) for words in _sentences(part, tokenizer, template)],
        )
        for example, words, (before, after) in zip(examples, sentences, sides, strict=True):
            rows.add_sentence(words, before, after, template, seq_len)
            rows.close(example.targets)
        return rows.finish()
    for example, parts in zip(examples, _tokens(examples, tokenizer), strict=True):
        if len(parts) == 1:
            rows.add(template, parts[0][: seq_len - template.size(1)])
        else:
            room = seq_len - template.size(2)
            for second in parts[1:]:
                kept = max(room - len(second), 0 if kind == "choice" else -(-room // 2))
                rows.add(template, parts[0][:kept], second[: room - min(kept, len(parts[0]))])
            if both_orders:
                kept = max(room - len(parts[0]), -(-room // 2))
                rows.add(template, parts[1][:kept], parts[0][: room - min(kept, len(parts[1]))])
        rows.close(example.targets)
    return rows.finish()


def _tokens(examples: Sequence[Example], tokenizer: Tokenizer, blank: str = "") -> list[list[NDArray[np.int32]]]:
    """Return the tokens of each text of each example; `blank` comes before all texts but an example's first."""
    texts = [blank * (number > 0) + text for example in examples for number, text in enumerate(example.texts)]
    ids, lengths = tokenizer.encode(texts)
    tokens = iter(np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1]))
    return [[next(tokens) for _ in example.texts] for example in examples]


def _sentences(examples: Sequence[Example], tokenizer: Tokenizer, template: Template) -> list[list[NDArray[np.int32]]]:
    """Return the tokens of each word of each sentence; at least one, since a word that the tokenizer drops has a
    label."""
    # In a byte-bpe vocabulary a word in a text starts with a space; other tokenizers take any text for a word's start.
    sentences = _tokens(examples, tokenizer, " " if tokenizer.kind == "byte-bpe" else "")
    unknown = np.array([template.unknown], np.int32)
    return [[word if len(word) else unknown for word in words] for words in sentences]


class _Rows:
    """Collects sequences and examples."""

    def __init__(self) -> None:
        self.sequences: list[NDArray[np.int32]] = []
        self.second_starts: list[int] = []
        self.words: list[NDArray[np.int64]] = []
        self.examples = [0]
        self.targets: list[Sequence[float]] = []

    def add(self, template: Template, first: NDArray[np.int32], second: NDArray[np.int32] | None = None) -> None:
        head = [template.before, first] if second is None else [template.before, first, template.between]
        tail = [template.after] if second is None else [second, template.after]
        ids = np.concatenate([*head, *tail]).astype(np.int32)
        self.sequences.append(ids)
        self.second_starts.append(len(ids) if second is None else sum(map(len, head)))
        self.words.append(np.empty(0, np.int64))

    def add_sentence(
        self,
        words: Sequence[NDArray[np.int32]],
        before: NDArray[np.int32],
        after: NDArray[np.int32],
        template: Template,
        seq_len: int,
    ) -> None:
        room = seq_len - template.size(1)
        sentence = np.concatenate(words)[:room]
        before, after = around(before, after, room - len(sentence))
        ends = np.cumsum([len(word) for word in words])
        read = ends - 1 if template.reads_last else np.concatenate([[0], ends[:-1]])
        self.add(template, np.concatenate([before, sentence, after]))
        self.words[-1] = read[read < room] + len(template.before) + len(before)

    def close(self, targets: Sequence[float]) -> None:
        self.examples.append(len(self.sequences))
        self.targets.append(targets)

    def finish(self) -> Encoded:
        return Encoded(
            ids=np.concatenate(self.sequences),
            cu_seqlens=_cumulative(self.sequences),
            second_starts=np.array(self.second_starts, np.int32),
            cu_examples=np.array(self.examples, np.int64),
            words=np.concatenate(self.words).astype(np.int32),
            cu_words=_cumulative(self.words),
            targets=np.array([target for each in self.targets for target in each], np.float64),
            cu_targets=_cumulative(self.targets),
        )


def _cumulative(parts: Sequence[Any]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def batches(lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield every example once, in an order keyed by (seed, epoch), examples of similar length together.

    The examples are shuffled, cut into pools of a few batches and sorted by length within a pool; then the batches are
    shuffled, so that no length always comes first.

    Args:
        lengths: int64 (N,), tokens of each example.

    Yields:
        int64 (at most batch_size,): indexes of examples.
    """
    rng = np.random.Generator(np.random.Philox(key_of("fine-tuning order", seed, epoch)))
    shuffled = rng.permutation(len(lengths))
    pool = batch_size * _POOL_BATCHES
    cut: list[NDArray[np.int64]] = []
    for start in range(0, len(shuffled), pool):
        drawn = shuffled[start : start + pool]
        drawn = drawn[np.argsort(lengths[drawn], kind="stable")]
        cut += [drawn[i : i + batch_size] for i in range(0, len(drawn), batch_size)]
    for index in rng.permutation(len(cut)):
        yield cut[index]


def batches_of_tokens(lengths: NDArray[np.int64], tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield every example once, by length, as many at a time as have at most `tokens` in all, and at least one."""
    by_length = np.argsort(lengths, kind="stable")
    start, total = 0, 0
    for index, length in enumerate(lengths[by_length]):
        if total + length > tokens and index > start:
            yield by_length[start:index]
            start, total = index, 0
        total += int(length)
    yield by_length[start:]
