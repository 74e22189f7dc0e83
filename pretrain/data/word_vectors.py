"""Token vectors from co-occurrences: initial values of the token embeddings (`model.word_init`).

Gradient descent on a few million tokens gives rare tokens embeddings that are mostly noise: each occurrence moves them
by about the learning rate. Their co-occurrence counts are exact, and cheap. The steps are:

count which tokens are within 8 tokens of each other in a document
positive pointwise mutual information of each pair        Levy and Goldberg 2014, section 3.2
its `width` largest eigenvalues and their eigenvectors    section 3.3; eigenvalues to the power of 1/2
scale each token's vector to length 1                     Levy, Goldberg and Dagan 2015, sections 3.3 and 6
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of
from multihop.data_prep.dataset.shards import Documents, TokenDataset
from multihop.pretrain.data.array_file import ensure_array, open_array
from multihop.pretrain.models.config import ModelConfig

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_WINDOW = 8
_TOKENS = 16 * 2**20
"""Maximum number of tokens that are counted, about; of a larger text, evenly spaced documents are."""
_TOKENS_PER_PART = 2**20


def build_word_vectors(folder: Path, data: TokenDataset, model: ModelConfig, full: bool = False) -> None:
    """Write the vectors that a run needs into `folder`; keep an intact file.

    Args:
        full: Hash an existing file in any case, as `ensure_array` does.
    """
    if model.needs_word_vectors:
        vocab_size = data.manifest.tokenizer.vocab_size
        path = _path(folder, data.manifest.fingerprint, model.embedding_width)
        ensure_array(path, lambda: word_vectors(data.train, vocab_size, model.embedding_width), full)


def open_word_vectors(folder: Path, fingerprint: str, width: int) -> NDArray[np.float32]:
    """float32 (V, width): the result of `word_vectors` for the data with this fingerprint, memory-mapped.

    Raises:
        UserError: They are missing or damaged.
    """
    return open_array(_path(folder, fingerprint, width), np.float32, "the file of word vectors")


def word_vectors(documents: Documents, vocab_size: int, width: int) -> NDArray[np.float32]:
    """float32 (V, width): rows of length 1, or 0 for tokens that do not occur, such as special tokens.

    If the vocabulary has at most `width` tokens, the last columns are 0.
    """
    from scipy.sparse.linalg import eigsh

    vectors = np.zeros((vocab_size, width))
    rank = min(width, vocab_size - 1)
    if rank > 0:
        # Lanczos' first vector is fixed: the same text gives the same vectors.
        first = np.random.default_rng(0).standard_normal(vocab_size)
        values, eigenvectors = eigsh(_ppmi(_cooccurrences(documents, vocab_size)), k=rank, which="LM", v0=first)
        vectors[:, :rank] = eigenvectors * np.sqrt(np.abs(values))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    known = lengths > 1e-6
    return np.where(known, vectors / np.where(known, lengths, 1.0), 0.0).astype(np.float32)


def _cooccurrences(documents: Documents, vocab_size: int) -> "csr_array":
    """float64 (V, V), symmetric: how often two tokens are 1 to 8 tokens apart in a document."""
    from scipy.sparse import coo_array, csr_array

    counts = csr_array((vocab_size, vocab_size), dtype=np.float64)
    for tokens, owners in _parts(documents):
        pairs = []
        for distance in range(1, _WINDOW + 1):
            together = owners[distance:] == owners[:-distance]
            pairs.append((tokens[:-distance][together], tokens[distance:][together]))
        left, right = (np.concatenate(each) for each in zip(*pairs, strict=True))
        counts = counts + coo_array((np.ones(len(left)), (left, right)), shape=counts.shape).tocsr()
    return counts + counts.T


def _parts(documents: Documents) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (tokens, their documents), int64 (n,) each, for about a million tokens at a time."""
    stride = max(1, round(int(documents.lengths.sum()) / _TOKENS))
    counted = np.arange(0, len(documents), stride)
    lengths = documents.lengths[counted]
    for part in np.split(counted, np.flatnonzero(np.diff(np.cumsum(lengths) // _TOKENS_PER_PART)) + 1):
        tokens = np.concatenate([documents.tokens(i) for i in part.tolist()])
        yield tokens.astype(np.int64), np.repeat(part, documents.lengths[part])


def _ppmi(counts: "csr_array") -> "csr_array":
    """Positive pointwise mutual information: max(0, log(P(a, b) / (P(a) P(b)))), or 0 where a and b never co-occur."""
    pairs = counts.tocoo()
    totals = counts.sum(axis=1)
    pmi = np.log(pairs.data * pairs.data.sum() / (totals[pairs.row] * totals[pairs.col]))
    pairs.data = np.maximum(pmi, 0.0)
    return pairs.tocsr()


def _path(folder: Path, fingerprint: str, width: int) -> Path:
    return folder / f"word-vectors-{width}-{key_of('word vectors', fingerprint, width):016x}.npy"
