"""Made-up pairs: a sentence of invented words, and another whose words are those of the first spelled backwards."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig

_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
TOKENS = TokenizerConfig(vocab_size=120, special_tokens="t5", threads=1)
COMPLETED = TokenizerConfig(vocab_size=120, special_tokens="gpt2", threads=1)
"""The tokenizer of pairs for a causal model."""
CHARACTERS = TokenizerConfig(kind="char", special_tokens="t5", threads=1)
FIELDS = {"source": "en", "target": "es"}


def pair(number: int) -> tuple[str, str]:
    """Return source and target; each number gives another pair."""
    rng = random.Random(number)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(3, 12))]
    return " ".join(words) + ".", " ".join(word[::-1] for word in words) + "."


def shortened(number: int) -> tuple[str, str]:
    """Return a source, and a target that is the source without its vowels: never longer, and in the same order."""
    rng = random.Random(number)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
    return " ".join(words), " ".join(word.translate(dict.fromkeys(map(ord, "aeiou"))) for word in words)


def write_jsonl(path: Path, pairs: Iterable[tuple[str, str]]) -> Path:
    """Write JSON lines with the fields en and es; returns the path."""
    path.write_text("".join(json.dumps({"en": source, "es": target}) + "\n" for source, target in pairs))
    return path


def recipe(path: Path, **data: object) -> DataConfig:
    """Make a recipe of one file of `write_jsonl`, or of another with `fields` or `target_path`; a tenth is held out."""
    kind = data.keys() & {"fields", "target_path"}
    source = {"path": str(path), **({"fields": FIELDS} if not kind else {name: data.pop(name) for name in kind})}
    return DataConfig.model_validate({"sources": [Source.model_validate(source)], "heldout_fraction": 0.1, **data})
