"""Calls to a server that sends a byte now and then, so that the timeout of a single request never ends them."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from multihop.cluster.tracking import connection
from multihop.cluster.tracking.connection import check_access, connect, seconds_to_answer


@pytest.fixture
def dripping() -> Iterator[str]:
    """Address of a server that sends its response byte by byte."""
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
            while not ended.wait(0.2):
                connection.sendall(b" ")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        ended.set()


def test_calls_to_a_server_that_sends_a_byte_now_and_then_time_out(
    dripping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 2.0)
    connect(dripping)  # MLflow is imported
    check_access(dripping)
    with pytest.raises(ConnectionError, match="no answer within 2 seconds"):
        seconds_to_answer(dripping)


def test_results_and_exceptions_are_passed_on() -> None:
    assert connection.call_with_timeout(lambda: time.sleep(0.01)) is None
    with pytest.raises(KeyError):
        connection.call_with_timeout(lambda: {}["nothing"])


def test_a_call_of_many_requests_takes_as_long_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 1.0)
    answers: list[int] = []

    def ask() -> str:
        for number in range(15):
            time.sleep(0.1)
            answers.append(number)
            connection.note_answer()
        return "all"

    assert connection.call_with_timeout(ask) == "all" and len(answers) == 15

    def hang() -> None:
        connection.note_answer()
        ended.wait()

    ended = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 1 seconds"):
        connection.call_with_timeout(hang)
    ended.set()
