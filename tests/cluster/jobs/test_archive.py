"""The archive that is sent to a cluster with a job."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from multihop.cluster.jobs.archive import code_to_send, format_untracked, untracked_files, write_archive
from multihop.cluster.jobs.head_scripts.inspect_head import PACKAGES, code_hash
from multihop.cluster.runs.code_version import CodeVersion, code_version
from multihop.common.errors import UserError

ROOT = Path(__file__).parents[3]
LIMIT = 2**29


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "src" / "multihop").mkdir(parents=True)
    (root / "src" / "multihop" / "__init__.py").write_text("")
    for package in PACKAGES:
        (root / package).mkdir()
        (root / package / "__init__.py").write_text(f'"""{package}."""\n')
        (root / "src" / "multihop" / package).symlink_to(f"../../{package}")
    (root / ".gitignore").write_text("runs/\n*.log\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def version_of(root: Path, commit: str | None = "0" * 40) -> CodeVersion:
    return CodeVersion(root / "src" / "multihop", commit, commit is not None)


def names(root: Path) -> list[str]:
    return sorted(code_to_send(version_of(root)))


def test_tracked_and_new_files_are_sent_but_no_git_caches_runs_links_or_removed_files(repository: Path) -> None:
    (repository / "cluster" / "new.py").write_text("x = 1\n")
    (repository / "eval" / "__init__.py").unlink()
    (repository / "runs").mkdir()
    (repository / "runs" / "weights.bin").write_text("large")
    (repository / "a.log").write_text("")
    (repository / "secrets").symlink_to("/etc/passwd")
    assert names(repository) == [
        ".gitignore",
        "multihop/__init__.py",
        "multihop/cluster/__init__.py",
        "multihop/cluster/new.py",
        "multihop/common/__init__.py",
        "multihop/data_prep/__init__.py",
        "multihop/pretrain/__init__.py",
    ]


def test_without_git_the_package_is_sent_by_the_same_names(repository: Path) -> None:
    assert sorted(code_to_send(version_of(repository, None))) == [each for each in names(repository) if "/" in each]


def test_the_same_content_makes_the_same_archive_and_the_hash_tells_code_apart(
    repository: Path, tmp_path: Path
) -> None:
    one, again = tmp_path / "one.zip", tmp_path / "again.zip"
    local = version_of(repository)
    write_archive(one, {"recipe.yaml": b"a: 1"}, code_to_send(local), LIMIT)
    before = code_hash(local.package)
    (repository / "cluster" / "__init__.py").touch()
    write_archive(again, {"recipe.yaml": b"a: 1"}, code_to_send(local), LIMIT)
    assert one.read_bytes() == again.read_bytes() and code_hash(local.package) == before
    with zipfile.ZipFile(one) as archive:
        assert archive.read("recipe.yaml") == b"a: 1"
        assert not any(name.startswith(("/", "..", ".git/")) for name in archive.namelist())
    (repository / "cluster" / "__init__.py").rename(repository / "cluster" / "other.py")
    assert code_hash(local.package) is None  # a package is missing
    (repository / "cluster" / "__init__.py").write_text('"""cluster"""\n')
    assert code_hash(local.package) not in (None, before)


def test_an_archive_that_ray_would_refuse_is_refused_with_its_largest_files(repository: Path, tmp_path: Path) -> None:
    (repository / "big.bin").write_bytes(bytes(3_000_000))
    code = code_to_send(version_of(repository))
    archive = tmp_path / "a.zip"
    assert write_archive(archive, {}, code, 10**6).startswith("0.0 MB; largest: big.bin 3.0 MB, ")
    with pytest.raises(UserError, match=r"largest files are big.bin 3.0 MB.*\.gitignore"):
        write_archive(archive, {}, code, 100)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_a_large_file_is_not_read_into_memory(repository: Path, tmp_path: Path) -> None:
    with open(repository / "corpus.bin", "wb") as file:
        file.truncate(600_000_000)
    code = (
        "import resource, sys; from pathlib import Path; from multihop.cluster.jobs.archive import write_archive\n"
        "root, to = map(Path, sys.argv[1:]); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_archive(to, {}, {'corpus.bin': root / 'corpus.bin'}, 2**29)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(repository), str(tmp_path / "a.zip")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000  # kB


def test_untracked_files_are_named(repository: Path) -> None:
    (repository / ".env").write_text("TOKEN=abc")
    for number in range(6):
        (repository / f"note-{number}.txt").write_text("")
    found = untracked_files(version_of(repository))
    assert found == [".env", *(f"note-{number}.txt" for number in range(6))]
    assert format_untracked(found).startswith(
        ".env, note-0.txt, note-1.txt, note-2.txt, note-3.txt and 2 more: sent as well"
    )
    assert untracked_files(version_of(repository, None)) == []


def test_a_name_that_is_not_utf_8_is_refused(repository: Path, tmp_path: Path) -> None:
    (repository / os.fsdecode(b"caf\xe9.txt")).write_text("")
    code = code_to_send(version_of(repository))
    with pytest.raises(UserError, match=r"b'caf\\xe9.txt' is not UTF-8; rename it"):
        write_archive(tmp_path / "a.zip", {}, code, LIMIT)


def test_this_checkout_can_be_sent(tmp_path: Path) -> None:
    local = code_version()
    assert local.checkout == ROOT and code_hash(local.package) is not None
    sent = set(code_to_send(local))
    assert {
        "multihop/cluster/jobs/head_scripts/inspect_head.py",
        "multihop/pretrain/run/worker.py",
        "recipes/demo.yaml",
    } <= sent
    assert not any(name.startswith((".venv", "runs", ".git/")) or "__pycache__" in name for name in sent)
