"""Ranks connect only to processes that know the secret of their launch."""

import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.pretrain.engine.ranks import GLOO_AT_SCALE
from multihop.pretrain.engine.rendezvous import SECRET, Endpoint, Listener, Store, publish_endpoint, resolve_endpoint

PATIENCE = timedelta(seconds=20)


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    found = Listener(Endpoint("127.0.0.1", 0, secrets.token_bytes(32)))
    yield found
    found.close()


def plain_socket(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), timeout=20)


def is_dropped(connection: socket.socket) -> bool:
    """Return whether the other side closes the connection after the nonce that it sends to everyone."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_it_listens_on_one_address_only(listener: Listener) -> None:
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening if each.laddr.port == listener.endpoint.port] == ["127.0.0.1"]


def test_what_one_rank_sets_the_others_get(listener: Listener) -> None:
    one, other = Store(listener.endpoint, PATIENCE), Store(listener.endpoint, PATIENCE)
    one.set("address", b"\x00\xff")
    assert other.get("address") == b"\x00\xff" and other.clone().check(["address"])
    assert [each.add("there", 1) for each in (one, other)] == [1, 2]


def test_a_key_that_nobody_sets_is_named(listener: Listener) -> None:
    store = Store(listener.endpoint, timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match=r"set who within 0:00:00\.05"):
        store.get("who")


def test_whoever_does_not_know_the_secret_is_refused(listener: Listener) -> None:
    endpoint = listener.endpoint
    with pytest.raises(ConnectionError):
        Store(Endpoint(endpoint.host, endpoint.port, secrets.token_bytes(32)), PATIENCE)


def test_whoever_listens_in_place_of_rank_0_is_not_believed() -> None:
    impostor = Listener(Endpoint("127.0.0.1", 0, b"a guess"))
    endpoint = impostor.endpoint
    with pytest.raises(ConnectionError):
        Store(Endpoint(endpoint.host, endpoint.port, b"the secret"), PATIENCE)
    impostor.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        struct.pack(">I", 2**32 - 1) + b"x" * 100,
        struct.pack(">I", 64) + bytes(64),
        struct.pack(">I", 0),
    ],
    ids=["http", "a message of 4 GB", "no proof", "empty"],
)
def test_strangers_are_dropped_and_the_ranks_meet_all_the_same(listener: Listener, said: bytes) -> None:
    with plain_socket(listener.endpoint) as stranger:
        stranger.sendall(said)
        assert is_dropped(stranger)
    assert Store(listener.endpoint, PATIENCE).add("after strangers", 1) >= 1


def test_strangers_that_say_nothing_hold_nobody_up(listener: Listener) -> None:
    silent = [plain_socket(listener.endpoint) for _ in range(50)]
    assert Store(listener.endpoint, PATIENCE).add("beside the silent", 1) >= 1
    for each in silent:
        each.close()


KEYS, VALUES = st.sampled_from("abc"), st.binary(max_size=4)
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), st.just("n"), st.integers(-9, 9)),
    st.tuples(st.just("compare_set"), KEYS, VALUES.map(str), VALUES.map(str)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1)),
    st.tuples(st.just("multi_set"), st.just(["d", "e"]), st.tuples(VALUES, VALUES).map(list)),
    st.tuples(st.just("multi_get"), st.lists(st.sampled_from("de"), min_size=1)),
    st.tuples(st.just("append"), st.just("d"), VALUES),
    st.tuples(st.just("num_keys")),
)


@given(operations=st.lists(OPERATIONS, max_size=12))
def test_it_does_what_torchs_own_store_does(operations: list[tuple]) -> None:
    listener, reference = Listener(Endpoint("127.0.0.1", 0, b"secret")), dist.HashStore()
    store = Store(listener.endpoint, PATIENCE)
    for each in (store, reference):
        each.multi_set(["d", "e"], [b"", b"1"])
    for name, *arguments in operations:
        assert getattr(store, name)(*arguments) == getattr(reference, name)(*arguments), (name, arguments)
    listener.close()


@pytest.mark.parametrize("ranks", [2, 12])
def test_gloo_gets_the_addresses_of_all_ranks_in_a_few_requests(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GLOO_AT_SCALE:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listener = Listener(Endpoint("127.0.0.1", 0, secrets.token_bytes(32)))
    requests: Counter[str] = Counter()
    handle = listener._handle

    def counted(method: str, key: object, *values: object) -> object:
        if key != ["all ranks listen"]:  # until then they ask again and again
            requests[method] += 1
        return handle(method, key, *values)

    monkeypatch.setattr(listener, "_handle", counted)

    class Joined(Store):
        """Gets the addresses once all ranks have published theirs."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            if len(keys) == ranks and self.add("listening", 1) == ranks:
                self.set("all ranks listen", b"")
            super().wait(["all ranks listen"])
            return super().multi_get(keys)

    def join(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(Joined(listener.endpoint, PATIENCE), rank, ranks, PATIENCE)

    with ThreadPoolExecutor(ranks) as pool:
        groups = list(pool.map(join, range(ranks)))
        tensors = [torch.tensor([float(rank)]) for rank in range(ranks)]
        for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
            work.wait()
    assert {tensor.item() for tensor in tensors} == {sum(range(ranks))}
    assert requests["get"] == ranks and requests["leading"] == 0, requests
    listener.close()


RANK = """
import sys
from pathlib import Path
from multihop.pretrain.engine.ranks import join_process_group
ranks = join_process_group(Path(sys.argv[1]))
print(ranks.all_reduce_sum({"ranks": 1.0}))
ranks.shutdown()
"""


IMPOSTOR = f"""
from multihop.pretrain.engine import ranks
prove = ranks._authenticate
ranks._authenticate = lambda ranks, store, secret: prove(ranks, store, b"another")
{RANK}"""
"""Program that takes a rank's place in gloo's connections, which the store does not control."""


def start_rank(rank: int, run_dir: Path, code: str = RANK, **environment: str) -> "subprocess.Popen[str]":
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    where |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        env={**os.environ, **where, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_ranks_find_each_other_by_a_file_that_only_their_user_reads_and_a_stranger_with_their_port_gets_nothing(
    tmp_path: Path,
) -> None:
    first = start_rank(0, tmp_path)
    deadline = time.monotonic() + 120
    while not (files := list(tmp_path.glob(".rendezvous-*.json"))):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (file,) = files
    assert file.stat().st_mode & 0o777 == 0o600
    invitation = json.loads(file.read_text())
    listening = psutil.Process(first.pid).net_connections("tcp")
    assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}

    stranger = start_rank(1, tmp_path / "elsewhere", MASTER_PORT=str(invitation["port"]), **{SECRET: "00" * 32})
    _, complaint = stranger.communicate(timeout=120)
    assert stranger.returncode == 1 and "ConnectionError" in complaint

    second = start_rank(1, tmp_path)
    for process in (first, second):
        output, errors = process.communicate(timeout=120)
        assert output == "{'ranks': 2.0}\n", errors
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_whoever_slips_into_a_ranks_place_ends_the_start(tmp_path: Path) -> None:
    first, _ = start_rank(0, tmp_path), start_rank(1, tmp_path, IMPOSTOR)
    _, complaint = first.communicate(timeout=120)
    assert first.returncode == 1
    assert "ConnectionError: the process that answers as rank 1 does not know the secret of this launch" in complaint


def test_a_file_that_a_killed_start_left_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    gone = Listener(Endpoint("127.0.0.1", 0, b"old"))
    publish_endpoint(tmp_path, gone.endpoint)
    gone.close()
    listener = Listener(resolve_endpoint(tmp_path, 0))
    publish_endpoint(tmp_path, listener.endpoint)
    assert resolve_endpoint(tmp_path, 1) == listener.endpoint
    listener.close()


def test_a_host_name_that_others_cannot_reach_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.gethostname()
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")  # as Debian's installer writes /etc/hosts
    for key, value in {"MASTER_ADDR": name, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=r"ranks on other hosts cannot reach; give torchrun"):
        resolve_endpoint(tmp_path, 0)
