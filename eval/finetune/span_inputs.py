"""The windows of a task of answer spans, made once on a machine and mapped by all its trials.

A folder for each (task's files, tokenizer, special tokens, length, stride, numbers of examples): see
`multihop.eval.finetune.cached_folder`. Of the training questions only the tokens and the answers' positions are kept,
of the others also what answers are decoded with.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.cached_folder import cached_folder
from multihop.eval.finetune.input_cache import described, selected, task_of
from multihop.eval.finetune.inputs import Encoded
from multihop.eval.finetune.span_windows import Window, windows
from multihop.eval.finetune.templates import Template
from multihop.eval.tasks.task import Example, Task

_FORMAT = 3
_TASK = "task.json"
_QUESTIONS = "questions.json"
_ANSWERED = ("dev", "test")
_SETS = ("train", *_ANSWERED)


@dataclass(frozen=True)
class Questions:
    """Questions that are answered, and the windows of their contexts."""

    examples: Sequence[Example]
    encoded: Encoded
    """The windows, see `encoded`."""
    windows: Sequence[Window]


@dataclass(frozen=True)
class SpanInputs:
    """The encoded questions of a trial."""

    task: Task
    """The task without its examples."""
    train: Encoded
    """The windows of the training questions, see `encoded`."""
    dev: Questions
    test: Questions
    sizes: Mapping[str, int]
    """The number of questions of each set."""
    reported_on: str
    """The questions that `test` consists of: "test", "half of dev" or "dev"."""


def span_inputs(
    load: Callable[[], Task],
    fingerprint: str,
    tokenizer: Tokenizer,
    tokenizer_sha256: str,
    template: Template,
    null_last: bool,
    settings: TrialSettings,
) -> SpanInputs:
    """Return the encoded questions, from the cache; they are encoded if the cache lacks them.

    Args:
        load: reads the task's files.
        fingerprint: the fingerprint of the task that `load` returns.
        null_last: as in `windows`.

    Raises:
        UserError: `settings.seq_len` leaves no room for context.
    """
    names = {"seq_len", "stride", "max_examples", "max_dev_examples", "report_on"}
    chosen = settings.model_dump(mode="json", include=names)
    folder = cached_folder(
        ["spans", _FORMAT, fingerprint, tokenizer_sha256, asdict(template), null_last, chosen],
        lambda new: _make(new, load(), tokenizer, template, null_last, settings),
    )
    content = json.loads((folder / _TASK).read_text())
    return SpanInputs(
        task=task_of(content["task"]),
        train=Encoded.load(folder / "train"),
        dev=_load(folder / "dev"),
        test=_load(folder / "test"),
        sizes=content["sizes"],
        reported_on=content["reported_on"],
    )


def encoded(cut: Sequence[Window]) -> Encoded:
    """Return each window as an example, whose targets are the positions of the answer's first and last token."""
    nothing = np.zeros(len(cut) + 1, np.int64)
    return Encoded(
        ids=np.concatenate([window.ids for window in cut]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(len(window.ids) for window in cut)]),
        second_starts=np.array([window.second_starts for window in cut], np.int32),
        cu_examples=np.arange(len(cut) + 1),
        words=np.empty(0, np.int32),
        cu_words=nothing,
        targets=np.array([position for window in cut for position in (window.start, window.end)], np.float64),
        cu_targets=2 * np.arange(len(cut) + 1),
    )


def _make(
    folder: Path, task: Task, tokenizer: Tokenizer, template: Template, null_last: bool, settings: TrialSettings
) -> None:
    sets, reported_on = selected(task, settings)
    assert set(sets) == set(_SETS)
    for name, examples in sets.items():
        cut = windows(examples, tokenizer, template, null_last, settings.seq_len, settings.stride)
        encoded(cut).save(folder / name)
        if name in _ANSWERED:
            _save(folder / name, examples, cut)
    sizes = {name: len(examples) for name, examples in sets.items()}
    content = {"task": described(task), "sizes": sizes, "reported_on": reported_on}
    (folder / _TASK).write_text(json.dumps(content))


def _save(folder: Path, examples: Sequence[Example], cut: Sequence[Window]) -> None:
    """Write the parts of the windows and questions that `encoded` leaves out."""
    arrays = {
        "example": np.array([window.example for window in cut], np.int32),
        "null": np.array([window.null for window in cut], np.int32),
        "cu_context": np.cumsum([0, *(len(window.starts) for window in cut)]),
        "starts": np.concatenate([window.starts for window in cut]).astype(np.int32),
        "ends": np.concatenate([window.ends for window in cut]).astype(np.int32),
        "has_max_context": np.concatenate([window.has_max_context for window in cut]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    # Several questions share a context.
    contexts = {context: number for number, context in enumerate(dict.fromkeys(each.texts[1] for each in examples))}
    questions = [(each.texts[0], contexts[each.texts[1]], each.targets, each.id) for each in examples]
    (folder / _QUESTIONS).write_text(json.dumps({"contexts": list(contexts), "questions": questions}))


def _load(folder: Path) -> Questions:
    content = json.loads((folder / _QUESTIONS).read_text())
    contexts = content["contexts"]
    examples = [
        Example((question, contexts[number]), tuple(targets), id=official)
        for question, number, targets, official in content["questions"]
    ]
    cut = Encoded.load(folder)
    return Questions(examples, cut, _windows(cut, lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")))


def _windows(cut: Encoded, array: Callable[[str], NDArray[Any]]) -> list[Window]:
    """Restore the windows that were passed to `encoded` and `_save`, as views."""
    starts, ends, has_max_context = array("starts"), array("ends"), array("has_max_context")
    bounds, tokens = array("cu_context").tolist(), cut.cu_seqlens.tolist()
    columns = [array("example"), array("null"), cut.second_starts, cut.targets[::2], cut.targets[1::2]]
    return [
        Window(
            example=example,
            ids=cut.ids[tokens[i] : tokens[i + 1]],
            second_starts=second_starts,
            starts=starts[bounds[i] : bounds[i + 1]],
            ends=ends[bounds[i] : bounds[i + 1]],
            has_max_context=has_max_context[bounds[i] : bounds[i + 1]],
            null=null,
            start=int(start),
            end=int(end),
        )
        for i, (example, null, second_starts, start, end) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]
