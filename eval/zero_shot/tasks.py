"""The zero-shot tasks: where their official files are, and how a model is evaluated on them. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.common.errors import UserError
from multihop.common.files import sha256_file, sha256_json
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.multiple_choice import read as read_choices
from multihop.eval.tasks.table_files import official_folder
from multihop.eval.tasks.task import Task
from multihop.eval.zero_shot.cbt import read_cbt
from multihop.eval.zero_shot.choice import evaluate_choices
from multihop.eval.zero_shot.lambada import evaluate_lambada, read_lambada
from multihop.eval.zero_shot.minimal_pairs import evaluate_pairs, read_pairs
from multihop.eval.zero_shot.perplexity import evaluate_perplexity, read_perplexity_text
from multihop.eval.zero_shot.result import ZeroShotResult

if TYPE_CHECKING:
    from multihop.pretrain.models.layers.model import Model

Evaluate = Callable[["Model", Tokenizer, dict[str, int], Any, int], ZeroShotResult]
"""(model, tokenizer, special ids, what was read, maximum length in tokens) -> result"""


@dataclass(frozen=True)
class ZeroShotTask:
    """What is known of a task before its files are read."""

    files: tuple[str, ...]
    """The names of its file or directory in `eval.data_dir`, of which one is needed."""
    read: Callable[[Path], Any]
    evaluate: Evaluate
    source: str
    metric: str = "accuracy"
    higher_is_better: bool = True
    causal_only: bool = True


def _perplexity(files: tuple[str, ...], convention: Any, natural: bool, source: str) -> ZeroShotTask:
    return ZeroShotTask(
        files,
        partial(read_perplexity_text, convention=convention, detokenized=natural),
        lambda model, tokenizer, special_ids, text, seq_len: evaluate_perplexity(
            model, tokenizer, special_ids, text, seq_len
        ),
        source,
        metric="perplexity",
        higher_is_better=False,
    )


def _lambada(protocol: Any) -> ZeroShotTask:
    return ZeroShotTask(
        ("lambada/lambada_test.jsonl", "lambada/lambada_test_plain_text.txt"),
        read_lambada,
        lambda model, tokenizer, special_ids, passages, _: evaluate_lambada(
            model, tokenizer, special_ids, passages, protocol
        ),
        "LAMBADA (Paperno et al. 2016): the last word of a passage from a novel.",
    )


def _choices(files: tuple[str, ...], read: Callable[[Path], Any], source: str) -> ZeroShotTask:
    return ZeroShotTask(
        files,
        read,
        lambda model, tokenizer, special_ids, examples, _: evaluate_choices(model, tokenizer, special_ids, examples),
        source,
    )


def _labelled(name: str, part: str) -> Callable[[Path], Any]:
    return lambda path: getattr(read_choices(name, str(path.parent)), part)


_WIKITEXT = "WikiText (Merity et al. 2016), verified good and featured articles of Wikipedia, CC BY-SA 3.0."
_PTB = "Penn Treebank (Marcus et al. 1993; Mikolov et al. 2010), news of the Wall Street Journal."
_CBT = "Children's Book Test (Hill et al. 2015): a word of a sentence in a book, of ten of one kind."

ZERO_SHOT_TASKS: dict[str, ZeroShotTask] = {
    "wikitext2": _perplexity(
        ("wikitext-2-raw/wiki.test.raw", "wikitext-2/wiki.test.tokens"), "wikitext", False, _WIKITEXT
    ),
    "wikitext2-natural": _perplexity(
        ("wikitext-2-raw/wiki.test.raw", "wikitext-2/wiki.test.tokens"), "wikitext", True, _WIKITEXT
    ),
    "wikitext103": _perplexity(
        ("wikitext-103-raw/wiki.test.raw", "wikitext-103/wiki.test.tokens"), "wikitext", False, _WIKITEXT
    ),
    "wikitext103-natural": _perplexity(
        ("wikitext-103-raw/wiki.test.raw", "wikitext-103/wiki.test.tokens"), "wikitext", True, _WIKITEXT
    ),
    "ptb": _perplexity(("ptb/ptb.test.txt",), "ptb", False, _PTB),
    "ptb-natural": _perplexity(("ptb/ptb.test.txt",), "ptb", True, _PTB),
    "lambada": _lambada("plain"),
    "lambada-gpt2": _lambada("no stop words"),
    "cbt-cn": _choices(("cbt/cbtest_CN_test_2500ex.txt",), read_cbt, _CBT),
    "cbt-ne": _choices(("cbt/cbtest_NE_test_2500ex.txt",), read_cbt, _CBT),
    "swag-likelihood": _choices(
        ("swag",), _labelled("swag", "dev"), "SWAG (Zellers et al. 2018): how a described scene goes on."
    ),
    "race-likelihood": _choices(
        ("RACE",), _labelled("race", "test"), "RACE (Lai et al. 2017): questions of English examinations in China."
    ),
    "blimp": ZeroShotTask(
        ("blimp",),
        read_pairs,
        lambda model, tokenizer, special_ids, pairs, _: evaluate_pairs(model, tokenizer, special_ids, pairs),
        "BLiMP (Warstadt et al. 2020): minimal pairs of English sentences, CC BY 4.0.",
        causal_only=False,
    ),
}


def find(name: str, data_dir: str | None) -> Path:
    """The task's file or directory.

    Raises:
        UserError: it is missing.
    """
    folder = official_folder(data_dir)
    places = [folder / file for file in ZERO_SHOT_TASKS[name].files]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise UserError(
            f"task {name} reads {' or '.join(map(str, places))}, which is missing; put the official file there, or set "
            "eval.data_dir"
        )
    return found


def load(name: str, data_dir: str | None) -> Task:
    """The task with the hashes of its files. Its examples are read where it is evaluated.

    Raises:
        UserError: the files are missing.
    """
    path, declared = find(name, data_dir), ZERO_SHOT_TASKS[name]
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return Task(
        name=name,
        kind="zero-shot",
        metric=declared.metric,
        higher_is_better=declared.higher_is_better,
        source=declared.source,
        files_sha256=sha256_json([[file.name, sha256_file(file)] for file in files]),
    )
