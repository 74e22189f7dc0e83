"""Spellings of special tokens in vocabularies, and the ones that each kind of model needs."""

from collections.abc import Sequence

from multihop.common.errors import UserError

# In the order of their ids, from 0, in tokenizers that `multihop prep` trains. albert: as in its published vocabulary.
SPECIAL_TOKENS = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "albert": {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "gpt2": {"end": "<|endoftext|>", "unk": "<unk>"},
    "t5": {"pad": "<pad>", "end": "</s>", "unk": "<unk>"},
}

# Of several spellings the first one in the vocabulary is taken.
_MASKED = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_DECODER = {"end": ("<|endoftext|>", "</s>"), "unk": ("<unk>",)}
_PAIRS = {"pad": ("<pad>", "[PAD]"), "end": _DECODER["end"], "unk": ("<unk>", "[UNK]")}


def find_special_ids(tokens: Sequence[str], pairs: bool = False) -> dict[str, int]:
    """Find ids by name: pad, unk, cls, sep and mask of a masked model if it has all, else end and unk of a decoder.

    unk may be missing, since a byte-level tokenizer has none.

    Args:
        tokens: the vocabulary in the order of its ids.
        pairs: look for pad, end and unk of an encoder and a decoder instead, else for end and unk of a decoder alone.

    Raises:
        UserError: the vocabulary has neither set.
    """
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    lacking = {}
    first = ("an encoder and a decoder", _PAIRS) if pairs else ("a masked model", _MASKED)
    kinds = (first, ("a causal one", _DECODER))
    for objective, names in kinds:
        spelled = {name: next((token for token in names[name] if token in ids), None) for name in names}
        missing = [" or ".join(names[name]) for name in names if spelled[name] is None and name != "unk"]
        if not missing:
            return {name: ids[token] for name, token in spelled.items() if token is not None}
        lacking[objective] = ", ".join(missing)
    raise UserError("its vocabulary lacks " + ", and ".join(f"{lacks} for {name}" for name, lacks in lacking.items()))
