"""This node's network interfaces and ports."""

import socket


def free_port(host: str) -> int:
    """A port of this address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(host: str) -> str:
    """The network interface with this address. Left alone, gloo takes the first one, which others may not reach."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise RuntimeError(f"no network interface has Ray's address {host}")
