"""Files that carry executable content, in each place from which a command loads something: no command executes it."""

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from saved_tensors import as_version_3, rank_file, rewrite_manifest, save

from multihop.cluster.runs.recipe import read_recipe
from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.eval.tasks.known_tasks import load_task
from multihop.pretrain.checkpoint.huggingface_import import import_model
from multihop.pretrain.checkpoint.verify import load_weights, verify
from multihop.pretrain.data.array_file import open_array


class _Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def as_pickle(made: Path) -> bytes:
    return pickle.dumps(_Payload(made))


def as_torch_file(made: Path) -> bytes:
    """As torch.save writes it: a ZIP archive with a pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", as_pickle(made))
    return content.getvalue()


def as_object_array(made: Path) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([_Payload(made)], dtype=object), allow_pickle=True)
    return content.getvalue()


def as_yaml(made: Path) -> bytes:
    return f"name: !!python/object/apply:os.mkdir ['{made}']\n".encode()


def load_checkpoint(folder: Path, content: bytes) -> None:
    checkpoint = Path(save(folder, 1, 1))
    (checkpoint / rank_file(0)).write_bytes(content)
    entry = {"file": rank_file(0), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_manifest(checkpoint, files=[entry])
    for read in (verify, load_weights):
        with pytest.raises(UserError):
            read(str(checkpoint))
    as_version_3(checkpoint, files=[entry], parameters={"a": [12]})  # of which the files have headers
    with pytest.raises(UserError):
        verify(str(checkpoint))
    load_weights(str(checkpoint))


def load_index(folder: Path, content: bytes) -> None:
    (folder / "index.npy").write_bytes(content)
    open_array(folder / "index.npy", np.int64, "the sample index")


def load_recipe(folder: Path, content: bytes) -> None:
    (folder / "recipe.yaml").write_bytes(content)
    read_recipe(folder / "recipe.yaml", [])


def load_override(folder: Path, content: bytes) -> None:
    read_recipe(Path("recipes/demo.yaml"), [content.decode().strip().replace(": ", "=", 1)])


def load_own_task(folder: Path, content: bytes) -> None:
    (folder / "task.yaml").write_bytes(content)
    load_task(str(folder / "task.yaml"), None)


def load_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.model").write_bytes(content)
    import_tokenizer(folder / "tokenizer.model")


def load_published_model(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    (folder / "pytorch_model.bin").write_bytes(content)
    import_model(folder)


@pytest.mark.parametrize(
    ("load", "contents"),
    [
        (load_checkpoint, [as_pickle, as_torch_file, as_object_array]),
        (load_index, [as_pickle, as_torch_file, as_object_array]),
        (load_recipe, [as_yaml]),
        (load_override, [as_yaml]),
        (load_own_task, [as_yaml]),
        (load_tokenizer, [as_pickle, as_torch_file]),
        (load_published_model, [as_pickle, as_torch_file]),
    ],
)
def test_a_file_that_could_execute_code_is_refused_and_does_not(
    tmp_path: Path, load: Callable[[Path, bytes], None], contents: list[Callable[[Path], bytes]]
) -> None:
    for number, content in enumerate(contents):
        made, folder = tmp_path / f"made-{number}", tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UserError):
            load(folder, content(made))
        assert not made.exists()


def test_the_payloads_do_execute(tmp_path: Path) -> None:
    """Where something is unpickled: else the tests above would show nothing."""
    pickle.loads(as_pickle(tmp_path / "pickle"))
    np.load(io.BytesIO(as_object_array(tmp_path / "array")), allow_pickle=True)
    with zipfile.ZipFile(io.BytesIO(as_torch_file(tmp_path / "torch"))) as archive:
        pickle.loads(archive.read("archive/data.pkl"))
    yaml.unsafe_load(as_yaml(tmp_path / "yaml"))
    assert all((tmp_path / name).exists() for name in ("pickle", "array", "torch", "yaml"))
