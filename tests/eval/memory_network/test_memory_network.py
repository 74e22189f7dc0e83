"""Memory networks beside the equations of their paper, and bAbI's files."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.common.errors import UserError
from multihop.eval.memory_network.babi import PUBLISHED_JOINT, PUBLISHED_SINGLE_TASK, run_babi
from multihop.eval.memory_network.model import MemoryNetworks, NetworkSizes, Tying
from multihop.eval.memory_network.stories import encode_stories, vocabulary
from multihop.eval.memory_network.training import (
    TrainingSettings,
    answer,
    attend,
    draw_batches,
    noisy_times,
    random_generator,
    split,
    train_networks,
)
from multihop.eval.report.babi_report import write_babi_report
from multihop.eval.tasks.babi import Question, read, read_questions, task_files

PEOPLE, PLACES = ("Mary", "John", "Sandra"), ("kitchen", "garden", "office")
STORY = "1 Mary moved to the kitchen.\n2 John went to the garden.\n3 Where is Mary? \tkitchen\t1\n"


def write_task(folder: Path, stories: int, task: int = 1, seed: int = 0) -> Path:
    """Write files of bAbI's first kind: where a person is who moved, perhaps more than once."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        lines = []
        for _ in range(stories):
            at = {}
            for number in range(1, 5):
                person, place = rng.choice(PEOPLE), rng.choice(PLACES)
                at[person] = place
                lines.append(f"{number} {person} went to the {place}.")
            person = rng.choice(sorted(at))
            lines.append(f"5 Where is {person}? \t{at[person]}\t1")
        (folder / f"qa{task}_single-supporting-fact_{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_a_story_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "task.txt"
    path.write_text(STORY + "4 Mary went to the office.\n5 Where is Mary? \toffice,hall\t4\n1 A b.\n2 C? \td\t1\n")
    (first, second, third), unused = read_questions(path, 1)
    assert unused == 0
    assert first == Question(1, ("Mary moved to the kitchen.", "John went to the garden."), "Where is Mary?", "kitchen")
    assert second.statements == (*first.statements, "Mary went to the office.")
    assert second.answer == "office,hall"
    assert third.statements == ("A b.",)
    words = vocabulary([first, second, third])
    assert sorted(words.values()) == list(range(1, len(words) + 1))
    assert {"office", "office,hall", "d"} <= words.keys()
    stories = encode_stories([first, second, third], words, 2)
    names = {number: word for word, number in words.items()}
    newest = [names[word] for word in stories.sentences[stories.memories[1, 0]] if word]
    assert newest == ["mary", "went", "to", "the", "office"]
    assert stories.sizes.tolist() == [2, 2, 1], "of three statements the two newest are kept"
    assert not stories.sentences[0].any()


def test_a_name_is_one_word_in_sentences_and_answers() -> None:
    questions = [Question(5, ("Mary gave the milk to Fred.",), "Who received the milk?", "Fred")]
    words = vocabulary(questions)
    stories = encode_stories(questions, words, 50)
    assert "Fred" not in words and stories.answers[0] == words["fred"]
    assert words["fred"] in stories.sentences[stories.memories[0, 0]]


def test_of_a_longer_story_than_those_of_the_training_the_newest_statements_are_read() -> None:
    training = [Question(1, (f"Mary went to the {place}.",) * 3, "Where is Mary?", place) for place in PLACES] * 5
    statements = ("John went to the hall.", *training[0].statements)
    test = [replace(training[0], statements=statements), training[0]]
    words = vocabulary([*training, *test])
    stories = encode_stories([*training, *test], words, 50)
    is_test = np.arange(len(stories)) >= len(training)
    settings = TrainingSettings(restarts=1, epochs=1, linear_epochs=0)
    model = train_networks(stories.rows(~is_test), len(words) + 1, settings, 1).model
    logits, _ = attend(model, stories.rows(is_test), np.array([0, 1]))
    torch.testing.assert_close(logits[:, 0], logits[:, 1])


def test_a_task_of_few_questions_has_no_validation_error(tmp_path: Path) -> None:
    folder, out = write_task(tmp_path / "en", 4), tmp_path / "out"
    done = CliRunner().invoke(app, ["babi", str(folder), "--tasks", "1", "--out", str(out), "--restarts", "1"])
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert row["validation_error"] is None and row["error"] is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 Mary moved.\n1 John moved.\n", "no story has a question"),
        ("", "no story has a question"),
        ("1 Where is Mary? \tkitchen\t1\n", "line 1: no statement precedes the question, so its memory is empty"),
        ("1 A b.\n2 Where? \t\t1\n", "line 2: the question has no answer"),
        ("one A b.\n", "line 1: 'one A b.' is not a line of bAbI"),
        ("1 A b.\n2 Where?\tx\n", "line 2: '2 Where"),
        ("1 ...\n", "is not a line of bAbI"),
    ],
)
def test_a_file_that_is_not_babis_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "task.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_questions(path, 1)


def test_stories_without_a_question_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "task.txt"
    path.write_text("1 A b.\n2 C d.\n1 E f.\n2 G? \th\t1\n1 I j.\n")
    questions, unused = read_questions(path, 16)
    assert [each.statements for each in questions] == [("E f.",)]
    assert unused == 2


def test_a_task_is_also_classification(tmp_path: Path) -> None:
    write_task(tmp_path / "babi" / "en", 50, task=3)
    task = read("babi/3", str(tmp_path))
    assert [len(part) for part in (task.train, task.dev, task.test)] == [45, 5, 50]
    assert task.labels == tuple(sorted(PLACES))
    question, story = task.test[0].texts
    line = task_files(tmp_path / "babi" / "en", 3)[1].read_text().splitlines()
    assert question == line[4].partition(" ")[2].partition("\t")[0].strip()
    assert story.startswith(line[3].partition(" ")[2])
    assert task.labels[int(task.test[0].targets[0])] == line[4].split("\t")[1]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"1 Mary moved.\n1 John moved.\n", [], "no story has a question"),
        (
            b"1 A b.\n2 C? \td\t1\n1 C? \td\t1\n",
            [],
            "line 3: no statement precedes the question, so its memory is empty",
        ),
        (b"1 \xff\n", [], "cannot be read as UTF-8"),
        (STORY.encode(), ["--hops", "21"], "--hops 21: expected 1 to 20"),
        (STORY.encode(), ["--hops", "0"], "--hops 0: expected 1 to 20"),
        (STORY.encode(), ["--tasks", "1,21"], "bAbI has the tasks 1 to 20"),
        (STORY.encode(), ["--tasks", "1,3"], "has 0 files qa3_"),
        (STORY.encode(), ["--tasks", "one"], "--tasks one: expected numbers with commas"),
        (STORY.encode(), ["--tasks", ","], "--tasks ,: expected numbers with commas"),
    ],
)
def test_what_the_command_refuses_before_it_trains(
    text: bytes, options: list[str], message: str, tmp_path: Path
) -> None:
    folder, out = write_task(tmp_path / "en", 3), tmp_path / "out"
    task_files(write_task(folder, 3, task=2), 2)[1].write_bytes(text)
    command = ["babi", str(folder), "--out", str(out), "--restarts", "1", "--tasks", "1,2", *options]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, UserError)
    assert message in str(refused.exception) and "\n" not in str(refused.exception)
    assert not out.exists(), "task 1, whose files are good, was not trained either"


SIZES = NetworkSizes(vocab_size=9, sentence_words=4, memories=5, times=6, width=6, hops=3)


def by_hand(
    model: MemoryNetworks, network: int, sentences: Tensor, memories: Tensor, times: Tensor, question: int, linear: bool
) -> Tensor:
    """Return the logits of one question, word by word, as in sections 2 and 4.1 of Sukhbaatar et al. 2015; an empty
    memory is a vector of zeros."""
    sizes = model.sizes
    adjacent = sizes.tying == "adjacent"

    def vector(table: Tensor, sentence: int) -> Tensor:
        total = torch.zeros(sizes.width)
        for j, word in enumerate(sentences[sentence].tolist(), 1):
            if word:
                k = torch.arange(1, sizes.width + 1)
                # The paper's (1 - j/J) - (k/d) (1 - 2j/J), doubled, with j and k counted from 1/2.
                fraction = (j - 0.5) / sizes.sentence_words
                weight = (1 - fraction) - ((k - 0.5) / sizes.width) * (1 - 2 * fraction)
                total += 2 * weight * table[network, word]
        return total

    u = vector(model.word_embeddings[0] if adjacent else model.question_words, question)
    for hop in range(sizes.hops):
        a, c = (hop, hop + 1) if adjacent else (0, 1)
        m, out = (torch.zeros(sizes.memories, sizes.width) for _ in range(2))
        for i, (s, t) in enumerate(zip(memories.tolist(), times.tolist(), strict=False)):
            if s:
                m[i] = vector(model.word_embeddings[a], s) + model.temporal_embeddings[a][network, t]
                out[i] = vector(model.word_embeddings[c], s) + model.temporal_embeddings[c][network, t]
        p = m @ u if linear else (m @ u).softmax(0)
        u = (u if adjacent else u @ model.between_hops[network]) + p @ out
    return (model.word_embeddings[-1] if adjacent else model.answer_words)[network] @ u


@pytest.mark.parametrize("tying", ["adjacent", "layerwise"])
@pytest.mark.parametrize("linear", [False, True])
@settings(max_examples=10)
@given(data=st.data())
def test_the_network_is_that_of_the_papers_equations(tying: str, linear: bool, data: st.DataObject) -> None:
    model = MemoryNetworks(replace(SIZES, tying=tying), networks=2, seed=3)  # type: ignore[arg-type]
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    # Of each network its own, or the same of all.
    sentences = torch.from_numpy(rng.integers(1, 9, (data.draw(st.sampled_from([1, 2])), 7, 4)))
    lengths = rng.integers(1, 5, (len(sentences), 7, 1))
    sentences[torch.arange(4) >= torch.from_numpy(lengths)] = 0
    sentences[:, 0] = 0
    # Fewer columns than memories: a batch without long stories.
    memories = torch.from_numpy(rng.integers(1, 7, (2, 3, data.draw(st.integers(3, 5)))))
    memories[torch.arange(memories.shape[2]) >= torch.from_numpy(rng.integers(1, 6, (2, 3, 1)))] = 0
    times = torch.from_numpy(rng.integers(0, 6, memories.shape))
    questions = torch.from_numpy(rng.integers(1, 7, (2, 3)))
    logits, attention = model(sentences, memories, times, questions, linear)
    assert len(attention) == 3
    for network in range(2):
        for number in range(3):
            expected = by_hand(
                model, network, sentences[network % len(sentences)], memories[network, number],
                times[network, number], int(questions[network, number]), linear,
            )  # fmt: skip
            torch.testing.assert_close(logits[network, number], expected, rtol=1e-4, atol=1e-5)
    if not linear:
        for hop in attention:
            assert not hop[memories == 0].any()
            is_full = (memories > 0).sum(-1) == SIZES.memories
            torch.testing.assert_close(hop.sum(-1)[is_full], torch.ones(int(is_full.sum())))
            assert (hop.sum(-1)[~is_full] < 1).all()


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), seed=st.integers(0, 100))
def test_noisy_times_ascend_from_the_newest_with_a_tenth_of_gaps(sizes: list[int], seed: int) -> None:
    times = noisy_times(np.array(sizes), 50, 0.1, np.random.default_rng(seed))
    for size, row in zip(sizes, times, strict=True):
        assert row[0] >= 0
        assert (np.diff(row[:size]) > 0).all()
        assert row[size - 1] <= size - 1 + np.ceil(0.1 * size)
    assert (noisy_times(np.array(sizes), 50, 0.0, np.random.default_rng(seed)) == np.arange(50)).all()


def test_noisy_times_have_every_number_of_gaps_at_every_place() -> None:
    size, most = 30, 3
    times = noisy_times(np.full(2000, size), 50, 0.1, np.random.default_rng(1))[:, :size]
    assert set(times[:, -1] - (size - 1)) == set(range(most + 1))
    gaps = np.diff(times, axis=1, prepend=-1) > 1
    assert gaps.any(0).all(), "also before the newest memory"


@pytest.mark.parametrize(("hops", "tying"), [(1, "adjacent"), (2, "layerwise")])
def test_networks_learn_and_the_best_in_training_is_chosen(hops: int, tying: Tying, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "en", 200)
    questions, _ = read_questions(task_files(folder, 1)[0], 1)
    words = vocabulary(questions)
    stories = encode_stories(questions, words, 50)
    few = TrainingSettings(restarts=4, hops=hops, tying=tying, epochs=25, linear_epochs=5)
    trained = train_networks(stories, len(words) + 1, few, 1)
    errors = trained.training_wrong.mean(1)
    assert errors[trained.chosen] == errors.min() <= 0.1
    assert trained.validation_wrong[trained.chosen].mean() <= 0.1
    wrong, losses = answer(trained.model, stories, np.arange(len(stories)))
    assert wrong[trained.chosen].mean() < 0.1
    assert losses.shape == (4, 200)
    again = train_networks(stories, len(words) + 1, few, 1)
    assert (again.validation_wrong == trained.validation_wrong).all()
    assert sorted([*trained.validation, *trained.training]) == list(range(len(stories)))
    assert (answer(trained.model, stories, trained.training)[0] == trained.training_wrong).all()


@pytest.mark.parametrize("tying", ["adjacent", "layerwise"])
def test_training_is_that_of_a_plain_loop_over_the_papers_equations(tying: Tying) -> None:
    """Linear start, its rate, the halving after its end, and the clipping of each network by its own norm."""
    rng = random.Random(5)
    people = [rng.choices(PEOPLE, k=rng.randint(1, 3)) for _ in range(11)]
    questions = [
        Question(
            1, tuple(f"{person} to {rng.choice(PLACES)}" for person in each), f"Where {each[0]}", rng.choice(PLACES)
        )
        for each in people
    ]
    words = vocabulary(questions)
    stories = encode_stories(questions, words, 3)
    few = TrainingSettings(
        hops=2, tying=tying, width=4, memory_size=3, batch_size=4, linear_epochs=3, linear_lr=0.1, epochs=5, lr=0.3,
        halve_every=2, max_grad_norm=1.5, restarts=2,
    )  # fmt: skip
    trained = train_networks(stories, len(words) + 1, few, 1)

    sizes = NetworkSizes(vocab_size=len(words) + 1, sentence_words=3, memories=3, times=4, width=4, hops=2, tying=tying)
    model = MemoryNetworks(sizes, few.restarts, 1)
    draws = random_generator(1)
    _, training = split(len(stories), few, draws)
    sentences, memories, answers = map(torch.from_numpy, (stories.sentences, stories.memories, stories.answers))
    was_clipped, had_gaps = set(), set()
    for epoch, lr in enumerate((0.1, 0.1, 0.1, 0.3, 0.3, 0.15, 0.15, 0.075)):
        optimizer = torch.optim.SGD(model.parameters(), lr)
        seen = []
        for batch, times in draw_batches(stories, training, few, draws):
            seen.append(batch)
            had_gaps |= set((times != np.arange(3)).any(-1).flat)
            for network, numbers in enumerate(batch.tolist()):
                logits = [
                    by_hand(
                        model, network, sentences, memories[number], torch.from_numpy(times[network, row]),
                        int(stories.questions[number]), linear=epoch < 3,
                    )
                    for row, number in enumerate(numbers)
                ]  # fmt: skip
                optimizer.zero_grad()
                cross_entropy(torch.stack(logits), answers[numbers], reduction="sum").backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), few.max_grad_norm)
                was_clipped.add(bool(norm > few.max_grad_norm))
                optimizer.step()
        assert (np.sort(np.concatenate(seen, 1)) == np.sort(trained.training)).all(), "each question once"
    assert was_clipped == had_gaps == {True, False}
    trained_weights, expected = (dict(each.named_parameters()) for each in (trained.model, model))
    torch.testing.assert_close(trained_weights, expected, rtol=1e-4, atol=1e-5)


def test_a_networks_training_does_not_depend_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is clipped and stepped by its own gradient: one whose gradient is huge does not change another."""
    questions, _ = read_questions(task_files(write_task(tmp_path / "en", 40), 1)[0], 1)
    words = vocabulary(questions)
    stories = encode_stories(questions, words, 50)
    settings = TrainingSettings(restarts=2, hops=2, epochs=1, linear_epochs=0)
    first = []
    for factor in (1.0, 1e3):

        def scaled(sizes: NetworkSizes, networks: int, seed: int, factor: float = factor) -> MemoryNetworks:
            model = MemoryNetworks(sizes, networks, seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter[1] *= factor
            return model

        monkeypatch.setattr("multihop.eval.memory_network.training.MemoryNetworks", scaled)
        model = train_networks(stories, len(words) + 1, settings, 1).model
        first.append([parameter[0].clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*first, strict=True))


def test_the_command_writes_a_report_and_does_not_train_twice(tmp_path: Path) -> None:
    folder, out = write_task(tmp_path / "en", 60), tmp_path / "out"
    for number in (2, 3):
        write_task(folder, 20, number, seed=number)
    command = ["babi", str(folder), "--out", str(out)]
    alone = CliRunner().invoke(app, [*command, "--tasks", "1,2"])
    assert alone.exit_code == 0, alone.output
    written = (out / "results.jsonl").read_bytes()
    rows = [json.loads(line) for line in written.splitlines()]
    assert [row["task"] for row in rows] == [1, 2]
    assert len(rows[0]["errors_of_restarts"]) == 10
    report = (out / "report.md").read_text()
    assert f"| {100 * rows[0]['error']:.1f} | {PUBLISHED_SINGLE_TASK[1]:.1f} |" in report
    assert (out / "attention-1.png").read_bytes().startswith(b"\x89PNG")
    hops = rows[0]["example"]["attention"]
    assert len(hops) == 3
    assert all(abs(sum(hop) - 1) < 1e-5 for hop in hops)
    again = CliRunner().invoke(app, [*command, "--tasks", "2,1"])
    assert again.exit_code == 0, again.output
    assert (out / "results.jsonl").read_bytes() == written
    # The published errors are those of three hops, and of the best of ten networks.
    for number, option in enumerate((["--hops", "2"], ["--restarts", "2"])):
        other = tmp_path / f"other-{number}"
        fewer = CliRunner().invoke(app, [*command[:3], str(other), "--tasks", "1", *option])
        assert fewer.exit_code == 0, fewer.output
        (row,) = map(json.loads, (other / "results.jsonl").read_text().splitlines())
        assert f"| {100 * row['error']:.1f} |  |" in (other / "report.md").read_text()
    joint = CliRunner().invoke(app, [*command, "--tasks", "2,3", "--joint", "--layerwise"])
    assert joint.exit_code == 0, joint.output
    report = (out / "report.md").read_text()
    assert "layerwise tying, one network for these tasks, 10 networks from different weights, seed 1." in report
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()[2:]]
    assert [(row["task"], row["joint"], row["settings"]["tying"]) for row in rows] == [
        (2, True, "layerwise"),
        (3, True, "layerwise"),
    ]


def test_the_commands_option_trains_layerwise_networks(tmp_path: Path) -> None:
    folder, out = write_task(tmp_path / "en", 20), tmp_path / "out"
    command = ["babi", str(folder), "--out", str(out), "--tasks", "1", "--layerwise", "--restarts", "2", "--hops", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    train, test = (read_questions(path, 1)[0] for path in task_files(folder, 1))
    words = vocabulary([*train, *test])
    stories = encode_stories([*train, *test], words, 50)
    is_test = np.arange(len(stories)) >= len(train)
    layerwise = TrainingSettings(hops=2, tying="layerwise", restarts=2)
    trained = train_networks(stories.rows(~is_test), len(words) + 1, layerwise, 1)
    example = row["example"]
    asked = [(question.text, list(question.statements)) for question in test]
    number = asked.index((example["question"], example["statements"]))
    _, attention = attend(trained.model, stories.rows(is_test), np.array([number]))
    for hop, expected in zip(attention, example["attention"], strict=True):
        torch.testing.assert_close(hop[trained.chosen, 0].flip(0), torch.tensor(expected))


def test_the_report_has_the_mean_and_the_failed_tasks_beside_the_published_ones(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "en", 4)
    nothing = lambda what, epoch, epochs: None  # noqa: E731
    small = TrainingSettings(epochs=1, linear_epochs=0)
    (row,) = run_babi(folder, tmp_path / "out", [1], False, small, 1, nothing)
    # An error of 5 % has not failed.
    errors = [0.0, 0.05, 0.051, *[0.02] * 16, 1.0]
    rows = [row | {"task": task, "error": error, "seconds": 2.0 * task} for task, error in enumerate(errors, 1)]
    for joint, published_mean, published_failed in ((False, 13.9, 11), (True, 12.4, 11)):
        settings = {"settings": row["settings"] | {"width": 50 if joint else 20}, "joint": joint}
        write_babi_report([each | settings for each in rows], tmp_path / "out")
        lines = (tmp_path / "out" / "report.md").read_text().splitlines()
        cells = {
            line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[1:-1]]
            for line in lines
            if "|" in line
        }
        assert cells["mean"][2:4] == [f"{100 * sum(errors) / 20:.1f}", str(published_mean)]
        assert cells["failed"][2:4] == ["2", str(published_failed)]
        assert [cells[task][-1] for task in ("1", "20", "mean")] == ["2", "40", "21"]
        assert ("for all of these tasks together" in "".join(lines)) == joint


def test_of_a_longer_story_than_those_of_the_training_the_report_shows_what_is_read(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "en", 10)
    statements = [f"{number} Mary went to the {place}." for number, place in enumerate(2 * PLACES, 1)]
    path = task_files(folder, 1)[1]
    path.write_text("\n".join([*statements, "7 Where is Mary? \toffice\t6", ""]))
    done = CliRunner().invoke(app, ["babi", str(folder), "--out", str(tmp_path), "--tasks", "1", "--restarts", "1"])
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["example"]["statements"] == [statement.partition(" ")[2] for statement in statements[-4:]]
    assert [len(hop) for hop in row["example"]["attention"]] == [4, 4, 4]


def test_the_published_errors_have_the_published_means() -> None:
    assert round(sum(PUBLISHED_SINGLE_TASK.values()) / 20, 1) == 13.9
    assert round(sum(PUBLISHED_JOINT.values()) / 20, 1) == 12.4
