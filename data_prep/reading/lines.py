"""Splits a range of a text file into lines or blocks, and skips too long ones without holding them."""

from collections.abc import Callable, Iterable, Iterator

Line = tuple[int, bytes | None]
"""The offset of its first byte, and its bytes without the line feed; None: longer than the limit."""


def lines(chunks: Iterable[bytes], start: int, stop: float, limit: int, past_stop: bool = False) -> Iterator[Line]:
    """Yield the lines whose first byte is in [start, stop) of a file; holds at most `limit` bytes and a chunk.

    Args:
        chunks: the file's bytes from max(0, start - 1) on: the byte before decides whether a line begins at `start`.
        past_stop: yield the lines after `stop` too, for a caller who knows where to end.
    """
    at = position = max(0, start - 1)
    skipping = start > 0
    held: list[bytes] = []
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            position += len(line) + 1
            if skipping:
                skipping = False
            else:
                if held:
                    line = b"".join([*held, line])
                    held = []
                yield at, line if len(line) <= limit else None
            at = position
            if at >= stop and not past_stop:
                return
        position += len(rest)
        if skipping:
            if position >= stop:
                return
        elif rest:
            held.append(rest)
            if position - at > limit:
                yield at, None
                held, skipping = [], True
    if held:
        yield at, b"".join(held)


def blocks(
    chunks: Iterable[bytes], start: int, stop: float, limit: int, read_at: Callable[[int, int], bytes]
) -> Iterator[Line]:
    """Yield the blocks of lines, separated by blank lines, whose first byte is in [start, stop); see `lines`.

    Args:
        read_at: (nbytes, offset) -> bytes of the file, to see whether the first line continues a block.
    """
    begins = -1
    # Offset of the current block; -1: there is none, or it belongs to another range.
    after_blank: bool | None = None
    held: list[bytes] = []
    size = 0
    for at, line in lines(chunks, start, stop, limit, past_stop=True):
        if after_blank is None:
            after_blank = _follows_blank(at, read_at)
        if line is not None and not line.strip():
            if begins >= 0:
                yield begins, b"\n".join(held) if size <= limit else None
            if at >= stop:
                return
            begins, held, size, after_blank = -1, [], 0, True
            continue
        if begins < 0:
            if at >= stop:
                return
            if not after_blank:
                continue
            begins = at
        size += limit + 1 if line is None else len(line) + bool(size)
        if line is None or size > limit:
            held.clear()
        else:
            held.append(line)
        if size > limit and at >= stop:
            break  # too long, wherever it ends
    if begins >= 0:
        yield begins, b"\n".join(held) if size <= limit else None


def _follows_blank(at: int, read_at: Callable[[int, int], bytes], window: int = 4096) -> bool:
    """Return whether the line that ends just before `at` is blank or does not exist."""
    stop = at - 1
    while stop > 0:
        start = max(0, stop - window)
        left = read_at(stop - start, start).rstrip(b" \t\r\v\f")
        if left:
            return left.endswith(b"\n")
        stop = start
    return True
