"""Preparation on nodes that share only a bucket: each has its own cache, and cannot see that of the caller."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up_pairs import TOKENS, pair
from made_up_pairs import recipe as pairs_recipe
from s3_endpoint import S3

from multihop.common.cache import LIMIT
from multihop.common.errors import UserError
from multihop.common.storage import open_folder
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.dataset.verify import VERIFIED
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.stages.object_store import ObjectStoreStages

TOKENIZER = TokenizerConfig(vocab_size=150, threads=1)


class Nodes:
    """A caller and two other nodes, which take the tasks in turn."""

    def __init__(self, folder: Path, location: str) -> None:
        self.folder, self.location = folder, location
        self.done: set[tuple[str, str]] = set()
        """Pairs of a node and the type of an item that it processed."""
        self.dies_at = ""
        """Type of the item at which the caller is interrupted."""

    def prepare(self, data: DataConfig, tok: TokenizerConfig = TOKENIZER) -> Manifest:
        with self._at("caller") as cache:
            store = cache / "prepared"
            stages = ObjectStoreStages(self.location, [store], self._anywhere, self._here)
            return prepare(data, tok, store / "set", self._here, work=store / "work", object_store=stages)

    def data_set(self) -> dict[str, bytes]:
        return files_of(self.folder / "caller" / "prepared" / "set")

    def outputs(self) -> list[str]:
        return open_folder(self.location).files()

    def of(self, node: str) -> set[str]:
        return {item for where, item in self.done if where == node}

    @contextmanager
    def _at(self, node: str) -> Iterator[Path]:
        cache = self.folder / node
        cache.mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            yield cache

    def _here(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        for task in tasks:
            self._note("caller", task)
            yield function(task)

    def _anywhere(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            node = f"node-{number % 2}"
            self._note(node, task)
            hidden = self.folder / "hidden"
            os.rename(self.folder / "caller", hidden)
            try:
                with self._at(node):
                    result = function(task)
            finally:
                os.rename(hidden, self.folder / "caller")
            yield result

    def _note(self, node: str, task: Any) -> None:
        item = type(getattr(task, "item", task)).__name__
        if item == self.dies_at:
            raise KeyboardInterrupt
        self.done.add((node, item))


@pytest.fixture
def nodes(tmp_path: Path, bucket: str) -> Nodes:
    return Nodes(tmp_path / "nodes", f"{bucket}/stages")


@pytest.fixture
def recipe(planted: tuple[DataConfig, dict[str, str]], bucket: str) -> DataConfig:
    """A recipe with one source on the caller's disk and one in the bucket."""
    data, _ = planted
    texts = Path(data.sources[1].path)
    open_folder(f"{bucket}/texts").write(texts.name, [texts.read_bytes()])
    return data.model_copy(update={"sources": [data.sources[0], Source(path=f"{bucket}/texts/{texts.name}")]})


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of the files, except the one that records times."""
    files = [path for path in folder.glob("[a-z]*") if path.is_file() and path.name != VERIFIED]
    return {path.name: path.read_bytes() for path in files}


def kill_at(nodes: Nodes, item: str, recipe: DataConfig) -> None:
    """Interrupt the caller at an item, and delete all caches."""
    nodes.dies_at = item
    with pytest.raises(KeyboardInterrupt):
        nodes.prepare(recipe)
    shutil.rmtree(nodes.folder)
    nodes.dies_at = ""


def test_the_data_set_is_that_of_one_disk_although_requests_fail(
    nodes: Nodes, recipe: DataConfig, s3: S3, tmp_path: Path
) -> None:
    wanted = prepare(recipe, TOKENIZER, tmp_path / "local")
    s3.failing_every = 10
    assert nodes.prepare(recipe) == wanted
    s3.failing_every = 0
    assert nodes.data_set() == files_of(tmp_path / "local")
    assert nodes.of("caller") - {"list", "tuple"} == {"ReadSplit", "EvaluationNgrams"}  # their texts are there
    assert {"ReadSplit", "SortHashes", "SignSplit", "EncodeSplit", "AssembleShard"} <= nodes.of("node-0")


def test_pairs_and_their_two_tokenizers_pass_through_the_store(nodes: Nodes, tmp_path: Path) -> None:
    pairs = [pair(number) for number in range(120)]
    for side, name in enumerate(("a.en", "a.es")):
        (tmp_path / name).write_text("".join(each[side] + "\n" for each in pairs))
    data = pairs_recipe(tmp_path / "a.en", target_path=str(tmp_path / "a.es"))
    tok = TOKENS.model_copy(update={"separate_vocabularies": True, "vocab_size": 90})
    wanted = prepare(data, tok, tmp_path / "local")
    assert nodes.prepare(data, tok) == wanted and nodes.data_set() == files_of(tmp_path / "local")
    assert {"CountUnknown", "EncodeSplit"} <= nodes.of("node-0") and nodes.of("caller") <= {
        "ReadSplit",
        "list",
        "tuple",
    }


def test_another_caller_makes_only_what_a_killed_one_had_not_made(
    nodes: Nodes, recipe: DataConfig, s3: S3, tmp_path: Path
) -> None:
    kill_at(nodes, "AssembleShard", recipe)
    s3.requests.clear()
    manifest = nodes.prepare(recipe)
    written = {path.split("/")[3] for method, path in s3.requests if method in ("PUT", "POST")}
    assert written == {"shards"}
    assert manifest == prepare(recipe, TOKENIZER, tmp_path / "local")


def test_outputs_that_no_data_set_needs_leave_the_store(nodes: Nodes, recipe: DataConfig) -> None:
    def of(stage: str) -> list[str]:
        return [name for name in nodes.outputs() if name.startswith(f"{stage}/")]

    nodes.prepare(recipe)
    read, near = of("read"), of("near")
    shutil.rmtree(nodes.folder)
    nodes.prepare(recipe.model_copy(update={"near_duplicates": None}))
    assert of("read") == read and near and not of("near")


def test_a_damaged_output_is_refused_by_name(nodes: Nodes, recipe: DataConfig) -> None:
    kill_at(nodes, "SortHashes", recipe)
    name = next(name for name in nodes.outputs() if name.endswith(".arrow"))
    folder, _, last = name.rpartition("/")
    remote = open_folder(f"{nodes.location}/{folder}")
    remote.write_atomically(last, remote.read_bytes(last)[:-1] + b"?")
    with pytest.raises(UserError, match=f"{nodes.location}/{name} is damaged"):
        nodes.prepare(recipe)
    for each in remote.names():
        remote.remove(each)
    nodes.prepare(recipe)


def test_what_was_set_aside_for_now_is_read_in_the_next_start(nodes: Nodes, data: DataConfig, corpus: Path) -> None:
    data = data.model_copy(update={"max_bad_fraction": 0.5})
    gone, kept = corpus / "a.jsonl", corpus.parent / "kept"
    nodes.dies_at = "ReadSplit"  # it is listed and hashed
    with pytest.raises(KeyboardInterrupt):
        nodes.prepare(data)
    nodes.dies_at = "EncodeSplit"
    rename = nodes._note

    def then_gone(node: str, task: Any) -> None:
        rename(node, task)
        if type(getattr(task, "item", None)).__name__ == "ReadSplit" and gone.exists():
            os.rename(gone, kept)

    nodes._note = then_gone  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        nodes.prepare(data)
    nodes._note, nodes.dies_at = rename, ""  # type: ignore[method-assign]
    os.rename(kept, gone)
    assert nodes.prepare(data).counts["read"] == {"kept": 120}


def test_a_node_keeps_to_the_limit_of_its_cache(
    nodes: Nodes, recipe: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "1e-6")
    with pytest.raises(UserError, match=f"{LIMIT}=1e-6 in this node's environment leaves no room"):
        nodes.prepare(recipe)
    monkeypatch.delenv(LIMIT)
    nodes.prepare(recipe)
    without = stage_bytes(nodes)
    shutil.rmtree(nodes.folder)
    for name in nodes.outputs():
        folder, _, last = name.rpartition("/")
        open_folder(f"{nodes.location}/{folder}").remove(last)
    monkeypatch.setenv(LIMIT, f"{without * 0.8 / 1e9}")
    nodes.prepare(recipe)
    assert 0 < stage_bytes(nodes) < without


def stage_bytes(nodes: Nodes) -> int:
    """Return the number of bytes of the outputs in the cache of one node."""
    return sum(path.stat().st_size for path in nodes.folder.glob("node-0/multihop/stages/**/*") if path.is_file())
