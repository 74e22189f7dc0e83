"""A link with delay and loss: `python slow_link.py ONE TWO SECONDS SHARE` forwards frames between two interfaces.

Linux's netem does this in the kernel, but not all kernels include it.
"""

import random
import select
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
"""Option for frames with a header that says what the kernel left to do: checksums, segmentation of large frames."""
_LARGEST = 2**17


def main() -> None:
    """Forward until this process is killed; each frame is delayed, and some are lost."""
    one, two = (_interface(name) for name in sys.argv[1:3])
    delay_s, loss = (float(argument) for argument in sys.argv[3:])
    other, on_its_way = {one: two, two: one}, deque[tuple[float, socket.socket, bytes]]()
    while True:
        rest = max(0.0, on_its_way[0][0] - time.monotonic()) if on_its_way else None
        for interface in select.select([one, two], [], [], rest)[0]:
            frame, address = interface.recvfrom(_LARGEST)
            if address[2] != socket.PACKET_OUTGOING and random.random() >= loss:
                on_its_way.append((time.monotonic() + delay_s, other[interface], frame))
        while on_its_way and on_its_way[0][0] <= time.monotonic():
            _, interface, frame = on_its_way.popleft()
            interface.send(frame)


def _interface(name: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.bind((name, 0))
    return found


if __name__ == "__main__":
    main()
