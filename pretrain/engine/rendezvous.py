"""Rendezvous of the ranks of a launch: a key-value store that requires the secret of the launch.

torch's TCPStore listens on all interfaces without authentication: anyone who reaches its port can list the keys, or
take a rank's place. This one listens on one address, and both sides of a connection prove that they know the secret
before anything else is read. Messages after that are neither encrypted nor signed.
"""

import base64
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multihop.common.errors import UserError
from multihop.pretrain.environment import SECRET

_LOOPBACK = "127.0.0.1"
_JOIN_TIMEOUT_S = 600.0
"""Seconds that a rank waits for rank 0 to listen: imports take seconds, and up to a minute from a cold disk."""
_HANDSHAKE_TIMEOUT_S = 10.0
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_MAX_MESSAGE_BYTES = 2**24
_POLL_S, _MAX_POLL_S = 0.005, 0.2
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Endpoint:
    """The address of rank 0, and the secret of the launch."""

    host: str
    port: int
    secret: bytes


def resolve_endpoint(run_dir: Path | None, rank: int) -> Endpoint:
    """The address and secret of this launch. On rank 0, which listens there, the port may be 0: any free port.

    Under a cluster they are in the environment. Under torchrun rank 0 generates the secret, and writes it to a file of
    the run directory that only its user may read as soon as it listens.

    Raises:
        UserError: MASTER_ADDR is a loopback address, and there are ranks on other hosts.
        TimeoutError: Rank 0 did not listen in time.
    """
    secret = os.environ.pop(SECRET, None)  # not inherited by child processes
    assert secret is not None or run_dir is not None or os.environ["WORLD_SIZE"] == "1", "rank 0 could not be found"
    if secret is not None:
        return Endpoint(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), bytes.fromhex(secret))
    if rank == 0:
        return Endpoint(_master_address(), 0, secrets.token_bytes(32))
    assert run_dir is not None
    return _read_endpoint_file(_endpoint_file(run_dir))


def on_one_host() -> bool:
    """Whether all ranks are on this host, according to the launcher's environment variables."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ["WORLD_SIZE"]


def publish_endpoint(run_dir: Path, endpoint: Endpoint) -> Path:
    """Write the address and secret to a file that only its user may read; remove it when all ranks have joined."""
    path = _endpoint_file(run_dir)
    content = json.dumps({"host": endpoint.host, "port": endpoint.port, "secret": endpoint.secret.hex()})
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(content)
    os.replace(temporary, path)
    return path


def _endpoint_file(run_dir: Path) -> Path:
    """A name with numbers that only the ranks of one launch of torchrun share."""
    launch = f"{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return run_dir / f".rendezvous-{launch}.json"


def _read_endpoint_file(path: Path) -> Endpoint:
    """The address at which rank 0 listens; in the file of a launch that was killed, nothing listens at the port."""
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        with suppress(FileNotFoundError):
            content = json.loads(path.read_text())
            endpoint = Endpoint(content["host"], content["port"], bytes.fromhex(content["secret"]))
            with suppress(OSError):
                _connect(endpoint).close()
                return endpoint
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write {path} and listen within {_JOIN_TIMEOUT_S:.0f} s; see its log")
        time.sleep(_MAX_POLL_S)


def _master_address() -> str:
    if on_one_host():
        return _LOOPBACK
    name = os.environ["MASTER_ADDR"]
    address = socket.gethostbyname(name)
    if address.startswith("127.") and name not in (address, "localhost"):
        raise UserError(
            f"MASTER_ADDR={name} is {address} on this host, which the ranks on other hosts cannot reach; give torchrun "
            "this host's address in their network: --rdzv-endpoint or --master-addr, and --local-addr"
        )
    return address


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket, max_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > max_bytes:
        raise ConnectionError(f"a message of {length} bytes, expected {max_bytes} at most")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side is gone")
        data += part
    return data


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ConnectionError("the other side does not know the secret of this launch")


def _connect(endpoint: Endpoint) -> socket.socket:
    """A connection to rank 0, after both sides have proved that they know the secret."""
    connection = socket.create_connection((endpoint.host, endpoint.port), timeout=_HANDSHAKE_TIMEOUT_S)
    try:
        nonces = _receive(connection, _NONCE_BYTES) + (nonce := secrets.token_bytes(_NONCE_BYTES))
        _send(connection, nonce + _proof(endpoint.secret, b"joins", nonces))
        _check(_receive(connection, _PROOF_BYTES), _proof(endpoint.secret, b"listens", nonces))
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


class Listener:
    """Rank 0's server: stores the keys and values, and serves each connection from a separate thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._secret = endpoint.secret
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._socket = socket.create_server((endpoint.host, endpoint.port), backlog=1024)
        self.endpoint = Endpoint(endpoint.host, self._socket.getsockname()[1], endpoint.secret)
        """The address, with the port that the system chose if it was 0."""
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; existing ones are still served."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="rendezvous", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):  # a peer that violates the protocol is disconnected
            connection.settimeout(_HANDSHAKE_TIMEOUT_S)
            _send(connection, nonce := secrets.token_bytes(_NONCE_BYTES))
            answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES)
            nonces = nonce + answer[:_NONCE_BYTES]
            _check(answer[_NONCE_BYTES:], _proof(self._secret, b"joins", nonces))
            _send(connection, _proof(self._secret, b"listens", nonces))
            connection.settimeout(None)
            while True:
                request = json.loads(_receive(connection, _MAX_MESSAGE_BYTES))
                _send(connection, json.dumps(self._handle(*request)).encode())

    def _handle(self, method: str, key: Any, *values: Any) -> Any:
        """Answer a request; `key` is a list of keys for "get" (None if one has no value) and "leading" (the number of
        keys before the first that has no value)."""
        with self._lock:
            match method, values:
                case "set", (str(value),):
                    self._values[key] = base64.b64decode(value)
                    return None
                case "get", ():
                    is_complete = all(each in self._values for each in key)
                    return [_base64(self._values[each]) for each in key] if is_complete else None
                case "leading", ():
                    return sum(1 for _ in takewhile(self._values.__contains__, key))
                case "append", (str(value),):
                    self._values[key] = self._values.get(key, b"") + base64.b64decode(value)
                    return None
                case "add", (int(amount),):
                    total = int(self._values.get(key, b"0")) + amount
                    self._values[key] = str(total).encode()
                    return total
                case "exchange", (str(expected), str(desired)):
                    stored = self._values.get(key)
                    if stored == base64.b64decode(expected) or (stored is None and not expected):
                        stored = self._values[key] = base64.b64decode(desired)
                    return base64.b64encode(stored if stored is not None else base64.b64decode(expected)).decode()
                case "delete", ():
                    return self._values.pop(key, None) is not None
                case "count", ():
                    return len(self._values)
        raise UserError(f"{method} is not a request of this store")


_stores: list["Store"] = []
"""Keeps stores alive: torch refers only to the C++ half of a store, which has no methods without the Python half."""


class Store(dist.Store):
    """A rank's client: the store that torch.distributed calls, from any thread."""

    timeout: timedelta
    """An attribute of torch's class that its type stubs lack."""

    def __init__(self, endpoint: Endpoint, timeout: timedelta) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._connection = _connect_with_retries(endpoint)
        self.set_timeout(timeout)
        _stores.append(self)

    def _request(self, *request: Any) -> Any:
        with self._lock:
            _send(self._connection, json.dumps(request).encode())
            return json.loads(_receive(self._connection, _MAX_MESSAGE_BYTES))

    def clone(self) -> "Store":
        """The same store with another connection."""
        return Store(self._endpoint, self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value; replaces an earlier one."""
        self._request("set", key, _base64(value))

    def get(self, key: str) -> bytes:
        """Wait until the key has a value, and return it."""
        return self.multi_get([key])[0]

    def has_extended_api(self) -> bool:
        """Whether `multi_get`, `multi_set` and `append` exist."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all keys have values, and return them; a rank gets the addresses of all others in one request."""
        while (values := self._request("get", keys)) is None:
            self.wait(keys)
        return [base64.b64decode(value) for value in values]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set the value of each key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, which is empty at first."""
        self._request("append", key, _base64(value))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, which starts at 0; returns the sum."""
        total: int = self._request("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`; returns the value after that."""
        return base64.b64decode(self._request("exchange", key, _base64(expected), _base64(desired)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return bool(self._request("delete", key))

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self._request("count", ""))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return bool(self._request("leading", keys) == len(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises:
            dist.DistStoreError: They were not set in time.
        """
        limit = timeout or self.timeout
        deadline, pause, left = time.monotonic() + limit.total_seconds(), _POLL_S, keys
        while left := left[self._request("leading", left) :]:
            # Until a rank has joined, all others ask for its key again and again, and not for those of all ranks.
            while not self.check(left[:1]):
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"no other rank has set {left[0]} within {limit}")
                time.sleep(pause)
                pause = min(2 * pause, _MAX_POLL_S)


def _base64(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _connect_with_retries(endpoint: Endpoint) -> socket.socket:
    """Connect to rank 0, which may still be importing. A peer with the wrong secret is not retried."""
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            return _connect(endpoint)
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_MAX_POLL_S)
