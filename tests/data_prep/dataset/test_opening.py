"""Opening a data set that is damaged or being rebuilt: it is read as it was written, or refused in a sentence."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from many_shards import prepare_many_shards
from prepared_data import bytes_of

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset import shards
from multihop.data_prep.dataset.shards import Documents, open_dataset
from multihop.data_prep.dataset.verify import verify_dataset
from multihop.data_prep.pipeline.prepare import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory, document) -> Path:
    """A data set."""
    folder = tmp_path_factory.mktemp("whole")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(document(number))
    data = DataConfig(sources=[Source(path=str(folder / "*.txt"))], heldout_fraction=0.1)
    prepare(data, TokenizerConfig(vocab_size=150, threads=1), folder / "out")
    return folder / "out"


def spoiled(content: bytes, at: int, other: int) -> bytes:
    return content[:at] + bytes([other]) + content[at + 1 :]


def read_spoiled(folder: Path, good: bytes, content: bytes) -> str | None:
    """Return the error of reading all lengths of a data set whose train shard has other content; None if it is read."""
    try:
        (folder / "train-00000.arrow").write_bytes(content)
        documents = open_dataset(folder).train
        assert documents.lengths.sum() == sum(len(documents.tokens(i)) for i in range(len(documents)))
    except ValueError as error:
        assert "damaged" in str(error) and "\n" not in str(error) and "run `multihop prep` again" in str(error)
        return str(error)
    finally:
        (folder / "train-00000.arrow").write_bytes(good)
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_shard_whose_description_is_damaged_is_read_or_refused_in_one_sentence(folder, draw):
    """Arrow raises many kinds of errors for such a shard; none may reach the user as a traceback."""
    good = (folder / "train-00000.arrow").read_bytes()
    near = draw.draw(st.integers(0, 1_199))
    at = draw.draw(st.sampled_from([near, len(good) - 1 - near]))
    read_spoiled(folder, good, spoiled(good, at, draw.draw(st.sampled_from([0, 127, 128, 255, good[at] ^ 1]))))


def test_a_shard_with_numbers_of_128_bits_is_refused_in_one_sentence(folder):
    good = (folder / "train-00000.arrow").read_bytes()
    widths = [
        match.start() for match in re.finditer(rb"[\x10\x20\x40]\0\0\0", good) if len(good) - match.start() < 1_200
    ]
    refused = [read_spoiled(folder, good, spoiled(good, at, 128)) for at in widths]
    assert any("Integers with more than 64 bits" in sentence for sentence in refused if sentence)


def test_a_reader_sees_the_data_set_whole_while_a_shard_of_it_is_rebuilt(tmp_path, data, tok):
    out = tmp_path / "out"
    prepare(data, tok, out)
    files, reader = bytes_of(out), open_dataset(out)
    tokens = reader.train.tokens(3).copy()
    (tmp_path / "other").write_bytes(spoiled(files["train-00000.arrow"], 5_000, 255))
    os.replace(tmp_path / "other", out / "train-00000.arrow")
    (out / "token_counts.npy").unlink()
    seen = []

    def looking(function, items):
        for result in map(function, items):
            seen.append((function.__name__, open_dataset(out).manifest == reader.manifest))
            yield result

    prepare(data, tok, out, looking)
    assert {"assemble_shard", "count_tokens"} <= {name for name, _ in seen} and all(same for _, same in seen)
    assert bytes_of(out) == files and verify_dataset(out) == []
    assert np.array_equal(reader.train.tokens(3), tokens)


def test_a_reader_between_two_data_sets_gets_an_error(tmp_path, data, tok, monkeypatch):
    """`prepare` writes both into one folder. `multihop` does not do that: it names folders by their content."""
    out = tmp_path / "out"
    prepare(data, tok, out)
    mapped = Documents.__init__

    def replaced_meanwhile(self, *given):
        mapped(self, *given)
        prepare(data.model_copy(update={"heldout_fraction": 0.2}), tok, out)

    monkeypatch.setattr(Documents, "__init__", replaced_meanwhile)
    with pytest.raises(UserError, match=r"replaced by another data set while it was opened|is damaged|has .* bytes"):
        open_dataset(out)


def test_a_data_set_of_many_shards_has_few_of_them_mapped_at_a_time(tmp_path, data, tok, monkeypatch):
    """Linux allows a process 65,530 mappings by default, fewer than a data set may have shards."""
    prepare_many_shards(data, tok, tmp_path / "out")

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/out/train-")

    documents = open_dataset(tmp_path / "out").train
    every = range(len(documents))
    tokens, names = [documents.tokens(i).tolist() for i in every], ("lengths", "ids", "sources")
    columns = [getattr(documents, name).tolist() for name in names]
    del documents
    assert mapped() == 0
    monkeypatch.setattr(shards, "MAX_MAPPED", 3)
    documents = open_dataset(tmp_path / "out").train
    assert len(documents.shard_starts) > 5 and mapped() == 0
    first = documents.tokens(0)
    for i in [*every, *reversed(every)]:
        assert documents.tokens(i).tolist() == tokens[i] and mapped() <= 4  # one more for `first`
    assert [getattr(documents, name).tolist() for name in names] == columns and mapped() <= 4
    assert first.tolist() == tokens[0]


def test_the_sentences_of_documents_of_several_shards_are_read_at_once(tmp_path, data, tok):
    prepare_many_shards(data, tok, tmp_path / "out")
    documents = open_dataset(tmp_path / "out").train
    every = [documents.sentence_ends(i).tolist() for i in range(len(documents))]
    assert len(documents.shard_starts) > 5
    for start in range(0, len(every), 3):
        for stop in (start, start + 1, (start + len(every)) // 2, len(every)):
            counts, ends = documents.sentences_in(start, stop)
            assert counts.tolist() == [len(each) for each in every[start:stop]]
            assert ends.tolist() == [end for each in every[start:stop] for end in each]
