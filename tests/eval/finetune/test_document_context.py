"""Sentences with other sentences of their document as context: what is added, and what does not change."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load
from multihop.eval.config import EvalConfig, TrialSettings
from multihop.eval.finetune.input_cache import TaskInputs, task_inputs
from multihop.eval.finetune.inputs import Encoded, encode
from multihop.eval.finetune.templates import Template, template_of
from multihop.eval.model.model_under_test import of_run
from multihop.eval.tasks.columns import tagged_examples
from multihop.eval.tasks.known_tasks import load_task, open_tasks
from multihop.eval.tasks.task import Example, Task
from multihop.eval.trials.check import check_settings
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.run_trial import run_trial
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]

# The words of a document differ from those of another.
_WORDS = {1: ("river", "stone"), 2: ("captain", "silver"), 0: ("garden", "letter")}


def _check_settings(config: EvalConfig, layers: int) -> None:
    sizes = {"family": "bert", "layers": layers, "hidden": 4, "heads": 1, "max_positions": 8}
    check_settings(config, open_tasks(config), parse_model_config(sizes))


def _open(data: Path, family: str = "bert") -> tuple[Tokenizer, Template]:
    info = open_dataset(data).manifest.tokenizer
    return load(data / info.file), template_of(family, info.special_ids, info.vocab_size)


def _sequences(encoded: Encoded) -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.ids, encoded.cu_seqlens[1:-1])]


def _words(encoded: Encoded) -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.words, encoded.cu_words[1:-1])]


@st.composite
def _documents(draw: st.DrawFn) -> tuple[Example, ...]:
    sentences = []
    for document, words in _WORDS.items():
        for _ in range(draw(st.integers(0, 6))):
            line = draw(st.lists(st.sampled_from([*words, " "]), min_size=1, max_size=8))
            sentences.append((tuple(line), tuple(draw(st.sampled_from("XY")) for _ in line), document))
    return tagged_examples(sentences or [(("stone",), ("X",), 1)], ("X", "Y"))


@given(part=_documents(), seq_len=st.integers(8, 40), data=st.data())
def test_a_sentence_is_as_without_context_and_its_room_is_filled_from_its_document(
    bert_data: Path, part: tuple[Example, ...], seq_len: int, data: st.DataObject
) -> None:
    tokenizer, template = _open(bert_data)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(part) - 1), min_size=1)))
    examples = [part[i] for i in chosen]
    plain = encode(examples, "tagging", tokenizer, template, seq_len)
    whole = encode(part, "tagging", tokenizer, template, 10_000)  # every sentence in full
    inner = [ids[1:-1] for ids in _sequences(whole)]
    result = encode(examples, "tagging", tokenizer, template, seq_len, document_context=part)
    room = seq_len - 2
    assert result.targets.tolist() == plain.targets.tolist() and result.cu_targets.tolist() == plain.cu_targets.tolist()
    for at, ids, bare, words, bare_words in zip(
        chosen, _sequences(result), _sequences(plain), _words(result), _words(plain), strict=True
    ):
        assert len(ids) <= seq_len and [ids[0], ids[-1]] == [bare[0], bare[-1]]
        assert len(words) == len(bare_words)
        # The sentence begins with its first word, and each word is at the same distance from there.
        left, own = words[0] - 1, bare[1:-1]
        assert [word - left for word in words] == bare_words
        assert ids[1 + left : 1 + left + len(own)] == own
        same = [i for i, e in enumerate(part) if e.document == part[at].document and e.document]
        before = [token for i in same if i < at for token in inner[i]]
        after = [token for i in same if i > at for token in inner[i]]
        right = len(ids) - 2 - left - len(own)
        assert ids[1 : 1 + left] == before[len(before) - left :]
        assert ids[1 + left + len(own) : -1] == after[:right]
        # Full use of the room, as evenly as possible.
        assert left + right == min(len(before) + len(after), room - len(own))
        assert abs(left - right) <= 1 or (left == len(before) if left < right else right == len(after))


def _inputs(task: Task, data: Path, **settings: object) -> TaskInputs:
    tokenizer, template = _open(data)
    chosen = TrialSettings.model_validate({"seq_len": 24, **settings})
    return task_inputs(lambda: task, task.fingerprint, tokenizer, "t", template, False, chosen)


def _conll(folder: Path, **files: str) -> str:
    (folder / "conll2003").mkdir()
    for name, text in files.items():
        (folder / "conll2003" / f"{name}.txt").write_text(text)
    return str(folder)


def _text(documents: Sequence[Sequence[str]], mark: bool = True) -> str:
    lines = []
    for sentences in documents:
        lines += ["-DOCSTART- -X- -X- O\n"] * mark
        lines += ["".join(f"{word} NN I-NP O\n" for word in sentence.split()) for sentence in sentences]
    return "\n".join(lines)


_TEXT = _text([["Captain silver stone", "river", "letter garden"], ["harbour river", "captain letter"]])


def test_the_context_of_chosen_examples_is_of_all_of_their_documents(bert_data: Path, tmp_path: Path) -> None:
    task = load_task("conll2003", _conll(tmp_path, train=_TEXT, valid=_TEXT))
    assert [(e.document, e.sentence) for e in task.train] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    plain = _inputs(task, bert_data, report_on="dev")
    tokens = [ids[1:-1] for ids in _sequences(plain.sets["train"])]
    one, two = [*tokens[0], *tokens[1], *tokens[2]], [*tokens[3], *tokens[4]]
    assert max(len(one), len(two)) <= 22, "both documents fit into 24 tokens"
    some = _inputs(task, bert_data, document_context=True, max_examples=2, report_on="half")
    full = _inputs(task, bert_data, document_context=True, report_on="dev")
    for sets in (some.sets, full.sets):
        for part in ("train", "dev", "test"):
            assert all(ids[1:-1] in (one, two) for ids in _sequences(sets[part]))
    assert [len(some.sets[part]) for part in ("train", "dev", "test")] != [5, 5, 5]
    # The cache keeps them apart.
    assert _sequences(_inputs(task, bert_data, report_on="dev").sets["train"]) == _sequences(plain.sets["train"])


@pytest.mark.usefixtures("conll")
def test_a_trial_with_context_predicts_every_word_once(
    bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint
) -> None:
    given = {"tasks": ["conll2003"], "document_context": True, "features": {"layers": [0], "head": "linear"}}
    config = EvalConfig.model_validate({**given, "seeds": [0], "epochs": 1, "seq_len": 48, "max_examples": 40})
    evaluated = of_run(bert, *checkpoint(bert, bert_data), 7, bert_data, open_dataset(bert_data).manifest)
    outcome = run_trial(plan_trials(config, open_tasks(config), evaluated)[0])
    assert outcome.row["status"] == "ok" and outcome.row["hyperparameters"]["document_context"] is True
    assert outcome.predictions is not None
    test = load_task("conll2003", None).test
    assert [len(words) for words in outcome.predictions["predicted"]] == [len(e.texts) for e in test]
    assert outcome.predictions["targets"] == [list(e.targets) for e in test]


def test_where_documents_begin_is_part_of_a_task(tmp_path: Path) -> None:
    first = load_task("conll2003", _conll(tmp_path, train=_TEXT, valid=_TEXT))
    (tmp_path / "conll2003" / "train.txt").write_text(_TEXT.replace("-DOCSTART- -X- -X- O\n\nharbour", "\nharbour"))
    second = load_task("conll2003", str(tmp_path))
    assert [e.texts for e in first.train] == [e.texts for e in second.train]
    assert first.fingerprint != second.fingerprint


def test_files_without_documents_are_refused(tmp_path: Path) -> None:
    data = _conll(tmp_path, train=_TEXT, valid=_text([["river stone"]], mark=False))
    own = {"name": "conll2003", "document_context": True}
    with pytest.raises(UserError, match="the development file of task conll2003 marks no documents; begin each"):
        _check_settings(EvalConfig.model_validate({"tasks": [own], "data_dir": data}), 2)
    _check_settings(EvalConfig.model_validate({"tasks": ["conll2003"], "data_dir": data}), 2)
    task = tmp_path / "own.yaml"
    task.write_text("kind: tagging\ntrain: a.txt\ndev: a.txt\nfields: {words: 0, labels: -1}\n")
    config = EvalConfig.model_validate({"tasks": [str(task)], "document_context": True})
    (tmp_path / "a.txt").write_text("# newdoc\nriver O\n\nstone O\n")
    _check_settings(config, 2)
    (tmp_path / "a.txt").write_text("river O\n\nstone O\n")
    with pytest.raises(UserError, match="the training file of task own marks no documents"):
        _check_settings(config, 2)


@pytest.mark.usefixtures("bbc")
def test_other_kinds_of_tasks_have_no_context() -> None:
    _check_settings(EvalConfig.model_validate({"tasks": ["bbc-topics"], "document_context": True}), 2)
    own = {"name": "bbc-topics", "document_context": True}
    with pytest.raises(UserError, match="is for tagging, but task bbc-topics is of kind classification"):
        _check_settings(EvalConfig.model_validate({"tasks": [own]}), 2)
