"""The bidirectional language model: its LSTM, its losses, what each direction sees, and the authors' own weights."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from packed_texts import packed, sequences_of
from pydantic import ValidationError
from small_shards import FIRST, documents_of, tokenizer_of
from torch import Tensor
from torch.nn import functional as F

from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.bilm.characters import CHARACTERS, character_ids
from multihop.pretrain.models.bilm.config import BilmConfig
from multihop.pretrain.models.bilm.lstm import ProjectedLstm
from multihop.pretrain.models.bilm.original_checkpoint import read_options, read_weights
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import PRESETS, parse_model_config
from multihop.pretrain.models.seq2seq.time_steps import time_steps_of
from multihop.pretrain.objectives import bilm
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.packed_tokens import PackedTokens

SIZES = {"family": "bilm", "layers": 2, "hidden": 16, "lstm_width": 12, "max_positions": 64, "dropout": 0.0}
VOCABULARY = 50
OPTIONS: dict[str, Any] = {
    "lstm": {
        "n_layers": 2, "dim": 6, "projection_dim": 4, "cell_clip": 3, "proj_clip": 3, "use_skip_connections": True,
    },
    "char_cnn": {
        "embedding": {"dim": 3}, "filters": [[1, 3], [2, 5]], "n_highway": 1, "n_characters": 262,
        "max_characters_per_token": 9, "activation": "relu",
    },
}  # fmt: skip
FIXTURES = os.environ.get("BILM_TF_FIXTURES")


def rough(vocabulary: int = VOCABULARY, **changes: Any) -> Any:
    """Return a model, in double precision, whose weights are so large that its clips matter."""
    model = build_model(parse_model_config({**SIZES, **changes}), vocabulary)
    init_weights(model, 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def slow_lstm(lstm: ProjectedLstm, x: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one sequence (T, P) becomes by the equations, step by step."""
    outputs = []
    for row in x.flip(0) if lstm.reverse else x:
        i, f, g, o = (lstm.input_weight @ row + lstm.state_weight @ r + lstm.bias).chunk(4)
        c = ((f + 1).sigmoid() * c + i.sigmoid() * g.tanh()).clamp(-lstm.cell_clip, lstm.cell_clip)
        r = (lstm.projection @ (o.sigmoid() * c.tanh())).clamp(-lstm.projection_clip, lstm.projection_clip)
        outputs.append(r)
    out = torch.stack(outputs)
    return out.flip(0) if lstm.reverse else out, r, c


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    clips=st.sampled_from([(None, None), (0.4, 0.3), (0.4, None)]),
    reverse=st.booleans(),
)
def test_the_lstm_is_that_of_its_equations_with_its_gradients(
    lengths: list[int], clips: tuple[float | None, float | None], reverse: bool
) -> None:
    model = rough(cell_clip=clips[0], projection_clip=clips[1])
    lstm, steps = model.layers[0].directions[int(reverse)], time_steps_of(sequences_of(lengths))
    generator = torch.Generator().manual_seed(sum(lengths))
    x, r, c = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64).requires_grad_()
        for rows, width in ((sum(lengths), 8), (len(lengths), 8), (len(lengths), 12))
    )
    order, rows = steps.order, steps.sorted_indices
    out, last = lstm(x[order], steps, (r[rows], c[rows]))
    found = (out[steps.inverse_order], *(each[steps.unsorted_indices] for each in last))
    parts = [slow_lstm(lstm, *each) for each in zip(x.split(lengths), r, c, strict=True)]
    expected = (torch.cat([each[0] for each in parts]), *(torch.stack([each[i] for each in parts]) for i in (1, 2)))
    weights = [x, r, c, *lstm.parameters()]
    gradients = []
    for results in (found, expected):
        upstream = torch.Generator().manual_seed(5)
        total = sum((each * torch.randn(each.shape, generator=upstream)).sum() for each in results)
        gradients.append(torch.autograd.grad(total, weights))  # type: ignore[arg-type]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other)
    if clips[1] is not None:
        assert out.abs().max() <= 0.3


def test_each_direction_sees_one_side_and_predicts_the_other() -> None:
    model, ids = rough(), torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[10] = (changed[10] + 1) % VOCABULARY
    for one, other in zip(*(model.hidden_states(packed(text, [20])) for text in (ids, changed)), strict=True):
        (forward, backward), (forward_changed, backward_changed) = one.chunk(2, 1), other.chunk(2, 1)
        assert torch.equal(forward[:10], forward_changed[:10]) and torch.equal(backward[11:], backward_changed[11:])
        assert not torch.equal(forward[10:], forward_changed[10:])
        assert not torch.equal(backward[:11], backward_changed[:11])
    first = model.hidden_states(packed(ids, [20]))[0]
    assert torch.equal(first, model.word.weight[ids].repeat(1, 2))


@pytest.mark.parametrize("skips", [False, True])
def test_the_loss_is_that_of_all_logits_of_both_directions(skips: bool) -> None:
    model, lengths = rough(skip_connections=skips), [6, 1, 4]
    ids = torch.randint(0, VOCABULARY, (11,), generator=torch.Generator().manual_seed(2))
    text = packed(ids, lengths)
    states = model.hidden_states(text)
    lstm_only = rough(skip_connections=False)
    if skips:
        # The second layer's input is added to its output, the embedding is not to the first one's.
        assert torch.equal(states[1], lstm_only.hidden_states(text)[1])
        torch.testing.assert_close(states[2], states[1] + lstm_only.hidden_states(text)[2])
    forward, backward = (F.linear(each, model.word.weight, model.word_bias) for each in states[-1].chunk(2, 1))
    expected = torch.zeros((), dtype=torch.float64)
    for start, stop in pairwise([0, 6, 7, 11]):
        expected += F.cross_entropy(forward[start : stop - 1], ids[start + 1 : stop], reduction="sum")
        expected += F.cross_entropy(backward[start + 1 : stop], ids[start : stop - 1], reduction="sum")
    sums = model(text, next_positions=torch.tensor([0, 1, 2, 3, 4, 7, 8, 9]))
    torch.testing.assert_close(sums["bilm"].double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.lm_head(states[-1]), forward)


def test_a_text_read_in_parts_with_the_state_kept_is_the_whole_for_the_forward_model() -> None:
    model, ids = rough(), torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(3))
    whole, _ = model.read(packed(ids, [9]))
    first, state = model.read(packed(ids[:4], [4]))
    second, _ = model.read(packed(ids[4:], [5]), state)
    for one, *parts in zip(whole, first, second, strict=True):
        torch.testing.assert_close(torch.cat(parts)[:, :8], one[:, :8])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    sentences=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    mem_len=st.integers(1, 30),
)
def test_memories_are_read_as_if_they_were_in_front_of_and_behind_a_sample(
    sentences: list[list[int]], mem_len: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = documents_of(tmp_path_factory.getbasetemp() / "bilm.arrow", sentences)
    tokenizer = tokenizer_of(np.ones(FIRST + 200, bool))
    batches = []
    for number in (0, mem_len):
        objective = ObjectiveConfig(name="bilm", mem_len=number)
        rows = bilm.build_index(documents, 12, 0, objective)
        batches.append(bilm.collate(documents, rows, np.zeros(len(rows), np.uint64), 12, tokenizer, objective))
    bare, inputs = (to_device(each.inputs, torch.device("cpu")) for each in batches)
    text, context = inputs["packed"], inputs["context"]
    assert torch.equal(text.input_ids, bare["packed"].input_ids) and batches[0].tokens == batches[1].tokens
    model = rough(FIRST + 200)
    around = context.input_ids.split(context.cu_seqlens.diff().tolist())
    states = []
    for number, sequence in enumerate(text.input_ids.split(text.cu_seqlens.diff().tolist())):
        before, after = (
            around[int(inputs[side][number]) - 1] if inputs[side][number] else sequence[:0]
            for side in ("preceding", "following")
        )
        words = [each[each >= FIRST] for each in (before, sequence, after)]
        document = int(np.searchsorted(np.cumsum([sum(each) for each in sentences]) + FIRST, words[1][0], side="right"))
        first = FIRST + sum(map(sum, sentences[:document]))
        # Ids ascend through all documents; a sample's other documents are whole, so that nothing is around them.
        whole = torch.arange(first, first + sum(sentences[document]))
        assert torch.equal(words[0], whole[whole < words[1][0]][-mem_len:])
        assert torch.equal(words[2], whole[whole > words[1][-1]][:mem_len])
        joined = torch.cat([before, sequence, after])
        read = model.encode(packed(joined, [len(joined)]))
        states.append(read[len(before) : len(before) + len(sequence)])
    at = inputs["next_positions"]
    forward, backward = torch.cat(states).chunk(2, 1)
    logits = torch.cat([forward[at], backward[at + 1]]) @ model.word.weight.T + model.word_bias
    labels = torch.cat([text.input_ids[at + 1], text.input_ids[at]])
    found = float(model(**inputs)["bilm"].detach())
    assert found == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-6)
    assert (float(model(**bare)["bilm"].detach()) == found) == (len(context.input_ids) == 1)


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4))
def test_words_become_bytes_between_marks(words: list[str]) -> None:
    ids = character_ids(words, 9)
    assert ids.shape == (len(words) + 2, 9) and ids.min() >= 1 and ids.max() < CHARACTERS
    assert ids[0].tolist() == [259, 257, 260, *[261] * 6] and ids[-1].tolist() == [259, 258, 260, *[261] * 6]
    for word, row in zip(words, ids[1:-1].tolist(), strict=True):
        read = [each - 1 for each in row[1 : row.index(260)]]
        assert row[0] == 259 and bytes(read) == word.encode("utf-8", "ignore")[:7]
        assert set(row[row.index(260) + 1 :]) <= {261}


def plain_word_embedding(model: Any, characters: list[int]) -> NDArray[np.float64]:
    """Return the embedding (P,) of a word from the ids of its characters, by bilm-tf's `_build_word_char_embeddings`:
    convolutions, the maximum over their positions, ReLU, highway layers, and a projection."""
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    layers: Any = model.config.characters
    x = []
    for number, (width, filters) in enumerate(layers.filters):
        kernel, bias = (weights[f"characters.convolutions.{number}.{part}"] for part in ("weight", "bias"))
        for which in range(filters):
            at_positions = []
            for start in range(len(characters) - width + 1):
                value = float(bias[which])
                for offset in range(width):
                    embedding = weights["word.weight"][characters[start + offset]]
                    value += sum(float(a) * float(b) for a, b in zip(kernel[which, :, offset], embedding, strict=True))
                at_positions.append(value)
            x.append(max(0.0, max(at_positions)))

    def linear(name: str, inputs: list[float]) -> list[float]:
        rows = zip(weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)
        return [float(bias) + sum(float(a) * b for a, b in zip(row, inputs, strict=True)) for row, bias in rows]

    for number in range(layers.highways):
        name = f"characters.highways.{number}"
        carried = [1 / (1 + math.exp(-each)) for each in linear(f"{name}.gate", x)]
        transformed = [max(0.0, each) for each in linear(f"{name}.transform", x)]
        x = [s * new + (1 - s) * old for s, new, old in zip(carried, transformed, x, strict=True)]
    return np.array(linear("characters.projection", x))


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=9), max_size=3),
    filters=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=3),
    highways=st.integers(0, 2),
    max_characters=st.integers(5, 9),
    seed=st.integers(0, 99),
)
def test_the_embeddings_of_words_are_those_of_the_equations(
    texts: list[str], filters: list[tuple[int, int]], highways: int, max_characters: int, seed: int
) -> None:
    # The last filter sees all characters at once; the words have one character, and as many as fit.
    filters = [*filters, (max_characters, 2)]
    words = ["a", "b" * (max_characters - 2), *(text for text in texts if text.encode("utf-8", "ignore"))]
    sizes = {"embedding": 3, "filters": filters, "highways": highways, "max_characters": max_characters}
    model = rough(CHARACTERS, layers=1, characters=sizes)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    texts_read = [word.encode("utf-8", "ignore")[: max_characters - 2] for word in words]
    rows = [[259, 257, 260], *([259, *(byte + 1 for byte in read), 260] for read in texts_read), [259, 258, 260]]
    expected = [plain_word_embedding(model, row + [261] * (max_characters - len(row))) for row in rows]
    ids = torch.from_numpy(character_ids(words, max_characters))
    text = PackedTokens(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]), len(ids))
    forward, backward = model.hidden_states(text)[0].detach().chunk(2, 1)
    assert torch.equal(forward, backward)
    np.testing.assert_allclose(forward.numpy(), np.stack(expected), rtol=1e-10, atol=1e-10)


def test_a_warning_names_the_longest_of_the_words_that_are_truncated(caplog: pytest.LogCaptureFixture) -> None:
    character_ids(["fits", "seven77"], 9)
    assert not caplog.records
    ids = character_ids(["fits", "eight888", "übermäßig", "x" * 5], 9)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 words are longer than 7 bytes and are truncated to that, as in the authors' code; the longest has 12: "
        "'übermäßig'; raise max_characters to read them whole"
    ]
    assert bytes((ids[3, 1:8] - 1).tolist()) == "übermäßig".encode()[:7]
    caplog.clear()
    character_ids(["y" * 1000], 50)
    assert f"has 1000: '{'y' * 60}…'; raise" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("words", "complaint"), [([], "the sentence has no words"), (["a", ""], "word 2 of the sentence is empty")]
)
def test_sentences_without_words_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        character_ids(words, 50)


@settings(max_examples=10)
@given(
    embedding=st.integers(1, 5),
    filters=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3),
    highways=st.integers(0, 2),
    max_characters=st.integers(5, 12),
)
def test_the_sizes_of_characters_are_those_of_the_weights(
    embedding: int, filters: list[tuple[int, int]], highways: int, max_characters: int
) -> None:
    sizes = {"embedding": embedding, "filters": filters, "highways": highways, "max_characters": max_characters}
    model: Any = build_model(parse_model_config({**SIZES, "characters": sizes}), CHARACTERS)
    init_weights(model, 1)
    assert model.word.weight.shape == (CHARACTERS, embedding)
    assert [(*each.weight.shape,) for each in model.characters.convolutions] == [
        (number, embedding, width) for width, number in filters
    ]
    assert len(model.characters.highways) == highways
    ids = character_ids(["a", "word", "longer than it may be"], max_characters)
    assert ids.shape == (5, max_characters)
    text = PackedTokens(torch.from_numpy(ids), torch.arange(5), torch.tensor([0, 5]), 5)
    states = model.hidden_states(text)
    assert [each.shape for each in states] == [(5, 16)] * 3 and all(each.isfinite().all() for each in states)
    with pytest.raises(UserError, match="has no output matrix"):
        model.lm_head(states[-1])


def test_what_a_model_cannot_be_is_refused() -> None:
    for changes, complaint in (
        ({"hidden": 15}, "hidden=15 is odd"),
        ({"characters": {"filters": [[9, 4]], "max_characters": 8}}, "a width of 9 characters"),
        ({"cell_clip": 0.0}, "greater than 0"),
        ({"heads": 2}, "family=bilm has no heads"),
    ):
        with pytest.raises(ValidationError, match=complaint):
            parse_model_config({**SIZES, **changes})
    phases = [{"seq_len": 8, "steps": 1}]
    with pytest.raises(ValidationError, match=r"set model\.characters=null"):
        TrainingConfig.model_validate({"model": {"preset": "elmo"}, "phases": phases})
    trained = TrainingConfig.model_validate({"model": {"preset": "elmo", "characters": None}, "phases": phases})
    assert trained.objective.name == "bilm"


def test_the_published_options_are_the_preset() -> None:
    published = {
        "lstm": {
            "use_skip_connections": True, "projection_dim": 512, "cell_clip": 3, "proj_clip": 3, "dim": 4096,
            "n_layers": 2,
        },
        "char_cnn": {
            "activation": "relu", "max_characters_per_token": 50, "n_characters": 262, "n_highway": 2,
            "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]], "embedding": {"dim": 16},
        },
    }  # fmt: skip
    preset = parse_model_config({"preset": "elmo"}).model_dump(exclude={"preset"})
    assert read_options(published, Path("options.json")).model_dump(exclude={"preset"}) == preset
    assert PRESETS["elmo"]["characters"] == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"char_cnn": {"activation": "tanh"}}, "activation='tanh', and only relu is supported"),
        ({"char_cnn": {"n_characters": 100}}, "n_characters=100; expected 261, the bytes and the markers"),
        ({"char_cnn": {"filters": [[1, 2], [2, 2]]}}, "as many filters as projection_dim=4"),
        ({"char_cnn": {"filters": [[12, 3]]}}, "a width of 12 characters"),
        ({"char_cnn": {"filters": 3}}, "does not have the options of ELMo"),
        ({"lstm": {"dim": 4}}, "dim=4 and projection_dim=4"),
        ({"lstm": {"cell_clip": -1}}, "cell_clip"),
        ({"lstm": None}, "has no lstm; expected the options of an ELMo"),
    ],
)
def test_options_that_are_not_supported_are_refused(changes: dict[str, Any], complaint: str) -> None:
    options = {section: {**OPTIONS[section], **(changes.get(section) or {})} for section in OPTIONS}
    for section, change in changes.items():
        if change is None:
            del options[section]
    with pytest.raises(UserError, match=complaint):
        read_options(options, Path("options.json"))


def test_a_folder_without_one_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    with pytest.raises(
        UserError, match=r"needs one \.hdf5 file of weights beside options.json, and has none; copy it there"
    ):
        read_weights(tmp_path)
    (tmp_path / "one_weights.hdf5").touch()
    (tmp_path / "other_weights.hdf5").touch()
    with pytest.raises(UserError, match=r"has one_weights.hdf5, other_weights.hdf5; leave one with"):
        read_weights(tmp_path)


def _published_layout(weights: dict[str, Tensor], config: BilmConfig) -> dict[str, NDArray[np.float32]]:
    """Return weights as arrays of the published files, by their names there."""
    assert config.characters is not None
    ours = {name: tensor.numpy() for name, tensor in weights.items()}

    def their_gates(gates: NDArray[np.float32]) -> NDArray[np.float32]:
        i, f, g, o = np.split(gates, 4)
        return np.concatenate([i, g, f, o])

    arrays = {"char_embed": ours["word.weight"][1:]}
    for number in range(len(config.characters.filters)):
        name = f"characters.convolutions.{number}"
        arrays[f"CNN/W_cnn_{number}"] = ours[f"{name}.weight"].transpose(2, 1, 0)[None]
        arrays[f"CNN/b_cnn_{number}"] = ours[f"{name}.bias"]
    for number in range(config.characters.highways):
        for name, theirs in (("gate", "carry"), ("transform", "transform")):
            arrays[f"CNN_high_{number}/W_{theirs}"] = ours[f"characters.highways.{number}.{name}.weight"].T
            arrays[f"CNN_high_{number}/b_{theirs}"] = ours[f"characters.highways.{number}.{name}.bias"]
    arrays["CNN_proj/W_proj"] = ours["characters.projection.weight"].T
    arrays["CNN_proj/b_proj"] = ours["characters.projection.bias"]
    for layer in range(config.layers):
        for direction in range(2):
            name, cell = f"layers.{layer}.directions.{direction}", f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}"
            kernel = np.concatenate([ours[f"{name}.input_weight"], ours[f"{name}.state_weight"]], axis=1)
            arrays[f"{cell}/LSTMCell/W_0"] = their_gates(kernel).T
            arrays[f"{cell}/LSTMCell/B"] = their_gates(ours[f"{name}.bias"])
            arrays[f"{cell}/LSTMCell/W_P_0"] = ours[f"{name}.projection"].T
    return arrays


def test_files_in_the_published_layout_are_read_or_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="the package h5py is not installed")
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    config = read_options(OPTIONS, Path("options.json"))
    model = build_model(config, CHARACTERS)
    init_weights(model, 3)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights["word.weight"][0] = 0  # is no character
    arrays = _published_layout(weights, config)

    def write(**changes: NDArray[Any] | None) -> None:
        with h5py.File(tmp_path / "weights.hdf5", "w") as file:
            for name, array in {**arrays, **changes}.items():
                if array is not None:
                    file[name] = array

    write()
    read_config, characters, found = read_weights(tmp_path)
    assert (read_config, characters) == (config, CHARACTERS) and found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name

    name = "CNN_proj/b_proj"
    for changed, complaint in (
        (None, "has no CNN_proj/b_proj; copy both files"),
        (np.full_like(arrays[name], np.nan), "has NaN or infinity in the weights for characters.projection.bias"),
        (arrays[name][:-1], "of shape"),
        (np.zeros(arrays[name].shape, np.int64), "of type int64, and weights are floating-point numbers"),
    ):
        write(**{name: changed})
        with pytest.raises(UserError, match=complaint):
            read_weights(tmp_path)
    (tmp_path / "weights.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(UserError, match="is not a complete HDF5 file"):
        read_weights(tmp_path)


@pytest.mark.skipif(FIXTURES is None, reason="BILM_TF_FIXTURES does not name tests/fixtures/model of bilm-tf")
def test_states_are_those_of_the_authors_own_test() -> None:
    """Their test reads ten batches of three sentences, and keeps the state of each row from one to the next."""
    h5py = pytest.importorskip("h5py", reason="the package h5py is not installed")
    folder = Path(str(FIXTURES))
    config, characters, weights = read_weights(folder)
    assert config.characters is not None
    model: Any = build_model(config, characters)
    model.load_state_dict(weights)
    model.eval()
    sentences = json.loads((folder / "lm_embeddings_sentences.json").read_text())
    states, compared, largest = None, 0, 0.0
    for number in range(len(sentences[0])):
        batch = [row[number].split() for row in sentences]
        ids = [character_ids(words, config.characters.max_characters) for words in batch]
        lengths = [len(each) for each in ids]
        bounds = torch.tensor([0, *np.cumsum(lengths)])
        text = PackedTokens(torch.from_numpy(np.concatenate(ids)), torch.zeros(0), bounds, max(lengths))
        with torch.no_grad():
            hidden, states = model.read(text, states)
        for row, found in enumerate(hidden[-1].split(lengths)):
            with h5py.File(folder / f"lm_embeddings_{row}.hdf5") as file:
                expected = torch.from_numpy(np.concatenate(list(file[str(number)][...]), axis=1))
            assert found[1:-1].shape == expected.shape
            largest = max(largest, float((found[1:-1] - expected).abs().max()))
            compared += 1
    print(f"{compared} sentences, largest difference {largest:.2e}")
    assert compared == 30 and largest < 1e-6
