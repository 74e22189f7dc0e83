"""Files that are opened must be files, and JSON that is read must be an object: anything else is one sentence."""

import os
import socket
from pathlib import Path

import pytest

from multihop.common.errors import UserError
from multihop.common.files import open_regular, read_json_object, sha256_file


@pytest.fixture
def no_file(tmp_path, request) -> Path:
    path = tmp_path / "it"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    return path


@pytest.mark.parametrize("no_file", ["fifo", "device", "folder", "socket"], indirect=True)
def test_what_is_no_regular_file_is_refused_before_it_is_read(no_file):
    for read in (open_regular, sha256_file):
        with pytest.raises(OSError, match=str(no_file)):
            read(no_file)
    with pytest.raises(UserError, match=rf"^{no_file} is not a JSON object \(it cannot be read: .*\); restore it"):
        read_json_object(no_file)


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b'{"a": [1, -2.5, null, {"b": "\xc3\xa9"}], "n": 18446744073709551615}')
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == (tmp_path / "file").read_bytes()
    assert read_json_object(tmp_path / "link") == {"a": [1, -2.5, None, {"b": "é"}], "n": 2**64 - 1}
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (bytes(100), "it holds nothing but NUL bytes"),
        (b'{"a": 1', "Expecting"),
        (b'{"a": 1}' + bytes(10), "Extra data"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"[1, 2]", "it holds a list"),
        (b"7", "it holds a number"),
        (b"null", "it holds a null"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "more than 64 deep"),
        (b'{"a":' * 988 + b"1" + b"}" * 988, "more than 64 deep"),
        (b'{"a":' + b"[" * 200_000, "more than 64 deep"),
        (b'{"a":' + b"9" * 5_000 + b"}", "it has an integer of more than 64 bits"),
        (b'{"a": -9223372036854775809}', "it has an integer of more than 64 bits"),
    ],
)
def test_what_is_no_json_object_is_reported_in_one_sentence_with_the_file_and_why(tmp_path, content, why):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"state\.json is not a JSON object \(.*\); remove it$") as refused:
        read_json_object(path, advice="remove it")
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_of_any_size_takes_no_more_memory_than_allowed(tmp_path):
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(UserError, match="it has more than 8,388,608 bytes"):
        read_json_object(path)
    path.write_bytes(b'{"a": 1}')
    assert read_json_object(path, max_bytes=8) == {"a": 1}
    with pytest.raises(UserError, match="it has more than 7 bytes"):
        read_json_object(path, max_bytes=7)
