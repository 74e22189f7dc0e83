"""A folder that trials of one machine share is made once, and again if the disk does not return what was written."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multihop.eval.finetune.cached_folder import cached_folder

FILES = {"a.bin": b"\x00" * 40, "0/ids.npy": b"numbers", "task.json": b"{}"}


def make(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@settings(max_examples=30)
@given(data=st.data())
def test_damaged_missing_or_extra_files_make_the_folder_again(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        folder = cached_folder(["identity"], make)
        assert content(folder) == FILES
        path = data.draw(st.sampled_from(sorted(each for each in folder.rglob("*") if each.is_file())))
        written = path.read_bytes()
        match data.draw(st.sampled_from(["flip", "cut", "remove", "add"])):
            case "flip":
                bit = data.draw(st.integers(0, 8 * len(written) - 1))
                path.write_bytes(
                    written[: bit // 8] + bytes([written[bit // 8] ^ 1 << bit % 8]) + written[bit // 8 + 1 :]
                )
            case "cut":
                path.write_bytes(written[: data.draw(st.integers(0, len(written) - 1))])
            case "remove":
                path.unlink()
            case "add":
                (folder / "other").write_bytes(b"")
        made = []
        assert cached_folder(["identity"], lambda new: (made.append(new), make(new))[1]) == folder
        assert content(folder) == FILES and len(made) == 1
        assert cached_folder(["identity"], made.append) == folder and len(made) == 1


def test_one_of_several_concurrent_trials_makes_the_folder(cache: Path) -> None:
    made: list[Path] = []

    def once(folder: Path) -> None:
        made.append(folder)
        make(folder)

    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: cached_folder("shared", once), range(8)))
    assert len(made) == 1 and content(folders.pop()) == FILES and not folders
    with pytest.raises(ValueError, match="no room"):
        cached_folder("other", lambda _: (_ for _ in ()).throw(ValueError("no room")))
    assert len([*(cache / "multihop" / "inputs").glob("[!.]*")]) == 1
