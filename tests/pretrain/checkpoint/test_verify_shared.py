"""The ranks of a run verify its checkpoints together: a share each, and with one result."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_jobs import choose, choose_where_rank_1_looks_elsewhere, verify_together
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool
from saved_tensors import as_version_3, flip, rank_file, rewrite_manifest, save

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import newest_good
from multihop.pretrain.checkpoint.verify_shared import assign_files

Pool = Callable[[int], RankPool]


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_every_file_is_some_ranks_share_and_the_shares_are_about_equal(sizes: list[int], world_size: int) -> None:
    found = assign_files(sizes, world_size)
    assert sorted(index for mine in found for index in mine) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in mine) for mine in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_choose_what_one_process_would(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Checkpoints are damaged in every way; each damaged file is named, whichever rank verifies it."""
    place = str(tmp_path)
    assert pool(ranks).run(choose, place) == [(None, [])] * ranks
    for step in range(1, 8):
        save(place, step, 2 + step % 3)
    as_version_3(folder_of_step(place, 1))
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    (tmp_path / "step-00000005" / rank_file(1)).unlink()
    for rank in (0, 2, 3):
        path = tmp_path / "step-00000005" / rank_file(rank)
        path.write_bytes(flip(path.read_bytes(), 100, rank))
    (tmp_path / "step-00000006" / "manifest.json").write_bytes(b"{")
    path = tmp_path / "step-00000007" / rank_file(2)
    path.write_bytes(path.read_bytes()[:-1])
    found, rejected = newest_good(place)
    assert found is not None and found.step == 3 and len(rejected) == 7
    assert pool(ranks).run(choose, place) == [(3, rejected)] * ranks
    for step in (2, 3):
        shutil.rmtree(folder_of_step(place, step))
    assert pool(ranks).run(choose, place) == [(1, rejected)] * ranks  # of format version 3
    rewrite_manifest(folder_of_step(place, 1), parameters={"a": [12]})
    (reason,) = set(pool(ranks).run(verify_together, folder_of_step(place, 1)))
    assert "of weight/norm.bias, the manifest says None" in reason
    assert pool(ranks).run(choose, place) == [(None, newest_good(place)[1])] * ranks


@pytest.mark.ranks
def test_what_some_ranks_do_not_see_is_not_taken_for_damaged(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "shared", 1, 2)
    arguments = str(tmp_path / "shared"), str(tmp_path / "elsewhere")
    (said,) = set(pool(2).run(choose_where_rank_1_looks_elsewhere, *arguments))
    assert said.startswith("rank 1 does not read the same ./step-00000001 as rank 0; choose a checkpoint.location")
