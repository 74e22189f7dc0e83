"""A cache with a limit."""

import os
from pathlib import Path

import pytest

from multihop.common.cache import LIMIT, evict_until_fits, pin
from multihop.common.errors import UserError


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three of a megabyte each, used one after the other."""
    result = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(result):
        with pin(folder):
            (folder / "data").write_bytes(bytes(10**6))
        os.utime(folder / ".in-use", (number, number))
    return result


def left(folders: list[Path]) -> str:
    return "".join(folder.name for folder in folders if folder.exists())


def test_without_a_limit_nothing_is_removed(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    evict_until_fits(folders, 10**12)
    assert left(folders) == "abc"


@pytest.mark.parametrize(
    ("limit", "needed", "stay"), [("0.004", 10**6, "abc"), ("0.003", 10**6, "bc"), ("0.003", 2 * 10**6, "c")]
)
def test_what_was_not_used_for_longest_goes_first(
    limit: str, needed: int, stay: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, limit)
    evict_until_fits(folders, needed)
    assert left(folders) == stay


def test_what_is_used_stays(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0.002")
    with pin(folders[0]), pin(folders[0]):
        os.utime(folders[0] / ".in-use", (0, 0))
        evict_until_fits(folders, 10**6)
        assert left(folders) == "a"
        with pytest.raises(UserError, match=r"MULTIHOP_CACHE_GB=0.002 .* leaves no room for 0.0 GB"):
            evict_until_fits(folders[:1], 2 * 10**6)
    evict_until_fits(folders[:1], 2 * 10**6)
    assert left(folders) == ""


@pytest.mark.parametrize("limit", ["10 GB", "inf", "nan"])
def test_a_limit_that_is_not_a_number_is_refused(
    limit: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, limit)
    with pytest.raises(UserError, match=rf"MULTIHOP_CACHE_GB={limit} .* is not a number of gigabytes"):
        evict_until_fits(folders, 1)
