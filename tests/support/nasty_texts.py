"""Texts that are difficult for tokenizers, the same for the same seed."""

import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence

_SNIPPETS = (
    *("\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\x00", "\x1c", "\x1f", "\x7f", "\x85", "\ufffd"),
    *("\r\n", "\n\n", "\n \n", "\t\t", "e\u0301", "\u0301", "a\u0323\u0302", "\u1e69", "ß", "İ", "\u0131", "Σ", "ς"),
    *(
        "ΑΣ ΟΔΟΣ.",
        "\u1112\u1161\u11ab\u1100\u1173\u11af",
        "한글",
        "ｶﾞ",
        "が",
        "か\u3099",
        "日本語。",
        "漢字",
        "「",
        "、",
    ),
    *(
        "ไทย",
        "हिन्दी",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "👍🏽",
        "\u2764\ufe0f",
        "\ue000",
        "\U000f0000",
        "\u0378",
        "\U0010fffd",
    ),
    *("\u212a", "\u037e", "'s", "'S", "\u2019s", "we'll", "''", "'", "``", "...", "--", "=====", "3.14", "²", "Ⅷ"),
    *("½", "١٢", "x_y", "_", "a.b", "#!/", "Ã©", "Ġ", "Ċ", "##a", "\ud7ff", "\uffff"),
    *("def f(x):\n        return x", "\n    ", "the"),
)


def nasty_texts(count: int, seed: int, spelled: Sequence[str] = ()) -> Iterator[str]:
    """Yield texts of up to a few hundred characters; some contain members of `spelled`, such as added tokens."""
    draw = random.Random(seed)
    by_category: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    del by_category["Cs"]  # surrogates are not text
    categories = sorted(by_category)

    def part() -> str:
        kind = draw.randrange(12)
        if kind <= 1:
            return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 12)))
        if kind == 2:
            return draw.choice(by_category[draw.choice(categories)]) * draw.choice([1, 1, 1, 2, 7])
        if kind == 3:
            return draw.choice([" ", "\t", "\n", "\u00a0"]) * draw.choice([1, 2, 3, 4, 8, 24, 25, 31])
        if kind == 4:
            return "".join(draw.choices("ABCDabcd0123.,;:!?()[]{}<>|/\\-_'\"#$%&*+=~^@` \n", k=draw.randint(1, 20)))
        if kind == 5:
            return draw.choice(["a", "é", "=", " ", "日", "1", "\u0301", "x "]) * draw.choice([5, 50, 210])
        if kind <= 7 and spelled:
            word = draw.choice(spelled)
            return draw.choice([word, word, word * 2, word.upper(), word[:-1], word[1:], f"x{word}y", f" {word} "])
        return draw.choice(_SNIPPETS) if kind <= 9 else " "

    for _ in range(count):
        text = "".join(part() for _ in range(draw.randint(0, 9)))
        form = draw.choice([None, None, None, "NFC", "NFC", "NFD"])
        yield text if form is None else unicodedata.normalize(form, text)
