"""Pieces that stand for no text: what a vocabulary calls them, and which of them an objective needs."""

from collections.abc import Sequence

# In the order of their ids, 0 and on, where `multihop prep` trains the tokenizer. Albert: its published vocabulary.
TRAINED = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "albert": {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "gpt2": {"end": "<|endoftext|>", "unk": "<unk>"},
}

# Of several spellings the first that there is.
_MASKED = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_DECODER = {"end": ("<|endoftext|>", "</s>"), "unk": ("<unk>",)}


def find_special(pieces: Sequence[str]) -> dict[str, int]:
    """Ids by name: pad, unk, cls, sep and mask if a masked model can do with them, else a decoder's end and unk.

    unk may be missing, since a tokenizer of bytes has none.

    Args:
        pieces: the vocabulary in the order of its ids.

    Raises:
        ValueError: other pieces are missing of both.
    """
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    lacking = {}
    for objective, names in (("a masked model", _MASKED), ("clm", _DECODER)):
        spelled = {name: next((piece for piece in names[name] if piece in ids), None) for name in names}
        missing = [" or ".join(names[name]) for name in names if spelled[name] is None and name != "unk"]
        if not missing:
            return {name: ids[piece] for name, piece in spelled.items() if piece is not None}
        lacking[objective] = ", ".join(missing)
    raise ValueError("its vocabulary lacks " + "; ".join(f"for {name} {lacks}" for name, lacks in lacking.items()))
