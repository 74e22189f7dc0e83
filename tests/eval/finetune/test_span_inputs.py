"""The windows that trials map into memory are those that were cut, and they are cut once."""

import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.span_inputs import SpanInputs, encoded, span_inputs
from multihop.eval.finetune.span_windows import Window, windows
from multihop.eval.finetune.templates import template_of
from multihop.eval.tasks.task import Example, Task

_WORDS = ("river", "stone", "letter", "garden", "Captain", "é")


def _questions(count: int, seed: int) -> tuple[Example, ...]:
    rng = random.Random(seed)
    contexts = [" ".join(rng.choices(_WORDS, k=rng.randint(1, 60))) for _ in range(count // 3)]
    examples = []
    for number in range(count):
        context = rng.choice(contexts)
        end = context.find(" ") if " " in context else len(context)
        examples.append(Example(("which", context), (0.0, float(end)) if number % 3 else (), f"q{seed}.{number}"))
    return tuple(examples)


@pytest.fixture(params=[False, True], ids=["bert", "gpt2"])
def inputs(request: pytest.FixtureRequest) -> Callable[..., tuple[SpanInputs, dict[str, list[Window]]]]:
    """A function from settings to the inputs that a trial maps into memory, and the windows of the same questions."""
    family = "gpt2" if request.param else "bert"
    data: Path = request.getfixturevalue(f"{family}_data")
    info = open_dataset(data).manifest.tokenizer
    tokenizer, template = load(data / info.file), template_of(family, info.special_ids, info.vocab_size)
    sets = {"train": _questions(12, 1), "dev": _questions(9, 2), "test": _questions(6, 3)}
    task = Task("squad2", "spans", "SQuAD F1", True, "", **sets, other_metrics=("exact match",))

    def make(settings: TrialSettings, known: bool = False) -> tuple[SpanInputs, dict[str, list[Window]]]:
        def read() -> Task:
            assert not known, "the questions are read again"
            return task

        found = span_inputs(read, task.fingerprint, tokenizer, info.sha256, template, request.param, settings)
        cut = {
            name: windows(part, tokenizer, template, request.param, settings.seq_len, settings.stride)
            for name, part in sets.items()
        }
        assert [*found.dev.examples] == [*sets["dev"]] and [*found.test.examples] == [*sets["test"]]
        assert found.sizes == {name: len(part) for name, part in sets.items()} and found.reported_on == "test"
        return found, cut

    return make


def test_the_windows_are_those_that_were_cut_and_a_second_trial_cuts_none(
    inputs: Callable[..., tuple[SpanInputs, dict[str, list[Window]]]], cache: Path
) -> None:
    settings = TrialSettings(seq_len=90, stride=7)
    for known in (False, True):
        found, cut = inputs(settings, known)
        assert len(cut["train"]) > 12
        for name, arrays in (("train", found.train), ("dev", found.dev.encoded), ("test", found.test.encoded)):
            expected = encoded(cut[name])
            for field in fields(expected):
                assert np.array_equal(getattr(arrays, field.name), getattr(expected, field.name)), field.name
        for questions, wanted in ((found.dev, cut["dev"]), (found.test, cut["test"])):
            for window, other in zip(questions.windows, wanted, strict=True):
                for field in fields(Window):
                    assert np.array_equal(getattr(window, field.name), getattr(other, field.name)), field.name
            assert isinstance(questions.encoded.ids.base, np.memmap)
    inputs(settings.model_copy(update={"lr": 1.0}), known=True)
    assert len([*(cache / "multihop" / "inputs").glob("[!.]*")]) == 1


def test_another_stride_cuts_other_windows(
    inputs: Callable[..., tuple[SpanInputs, dict[str, list[Window]]]],
) -> None:
    few, many = (inputs(TrialSettings(seq_len=90, stride=stride))[0] for stride in (60, 5))
    assert len(many.train) > len(few.train) and len(many.dev.windows) > len(few.dev.windows)
