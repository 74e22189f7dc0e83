"""Hosts on one machine: network namespaces on a bridge, each with an address of its own.

They share the disk, except those that are given one of their own.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
_NOBODY = "02:00:00:00:00:99"
"""A link-layer address that no host has."""


class Hosts:
    """`names[i]` has the address `addresses[i]`; all reach each other, and nothing else."""

    def __init__(self, count: int) -> None:
        """Make `count` hosts.

        Raises:
            OSError: this machine has no network namespaces, or does not let this user make them.
        """
        self._tag = f"mh{secrets.token_hex(2)}"
        self._bridge = f"{self._tag}br"
        self._folder = tempfile.TemporaryDirectory(prefix="mh-", ignore_cleanup_errors=True)
        self._slow: dict[int, subprocess.Popen[bytes]] = {}
        self._disks: dict[int, Path] = {}
        self.names = [f"{self._tag}{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        try:
            # A namespace of its own for the bridge: no address of the machine itself is taken.
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "br0", "up")
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", self._bridge)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", self._bridge, "link", "set", name, "master", "br0", "up")
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def environment(**more: str) -> dict[str, str]:
        """Return the environment of a command on a host."""
        return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}

    def give_disk(self, host: int) -> Path:
        """Give the host's commands an empty /tmp of their own from now on; returns the folder that is mounted there."""
        disk = Path(self._folder.name) / f"disk-{host}"
        disk.mkdir()
        self._disks[host] = disk
        return disk

    def start(self, host: int, command: Sequence[str], output: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Run a command on a host, its output in a file."""
        disk = self._disks.get(host)
        # `ip netns exec` makes a namespace for mounts too.
        mounted = [] if disk is None else ["sh", "-c", 'mount --bind "$0" /tmp && exec "$@"', str(disk)]
        with open(output, "ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *mounted, *command],
                cwd="/" if disk else None,
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def start_ray(
        self, host: int, output: Path, cpus: int, dashboard: bool = False, one_core: bool = False, **environment: str
    ) -> None:
        """Run `ray start` on a host: the first one is the head, with or without a dashboard; the others join it.

        Args:
            one_core: give the host one core, so that a rank has one thread, like ranks that share this machine.
        """
        head = ["--head", "--port=6379", f"--include-dashboard={str(dashboard).lower()}", "--dashboard-host=127.0.0.1"]
        role = head if host == 0 else [f"--address={self.addresses[0]}:6379"]
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *role, f"--node-ip-address={self.addresses[host]}", f"--num-cpus={cpus}"]
        # The folder must not be that of another Ray of this machine, and short, because paths of sockets begin with it.
        folder = [f"--temp-dir={self._folder.name}"] if host == 0 else []
        options = ["--object-store-memory=100000000", "--disable-usage-stats", *folder]
        pinned = ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[host])] if one_core else []
        started = self.start(host, [*pinned, *command, *options], output, **environment)
        if started.wait(timeout=120) != 0:
            raise AssertionError(output.read_text())

    def lose_power(self, host: int) -> None:
        """Make the host disappear at once, without closing its connections."""
        _ip("-n", self.names[host], "link", "set", "eth0", "down")
        self._end(host)

    def restore_power(self, host: int) -> None:
        """Restore the network of a host, on which no process runs."""
        _ip("-n", self.names[host], "link", "set", "eth0", "up")

    def cut(self, host: int, other: int) -> None:
        """Drop all that two hosts send each other, without telling either of them."""
        for one, two in ((host, other), (other, host)):
            neighbour = ["to", self.addresses[two], "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"]
            _ip("-n", self.names[one], "neighbour", "replace", *neighbour)

    def mend(self, host: int, other: int) -> None:
        """Undo a cut."""
        for one, two in ((host, other), (other, host)):
            _ip("-n", self.names[one], "neighbour", "delete", "to", self.addresses[two], "dev", "eth0")

    def unplug(self, host: int) -> None:
        """Take a host's link down without telling the host."""
        _ip("-n", self._bridge, "link", "set", self.names[host], "nomaster")

    def plug_in(self, host: int) -> None:
        """Bring a host's link up again."""
        _ip("-n", self._bridge, "link", "set", self.names[host], "master", "br0")

    def slow_down(self, host: int, delay_s: float, loss: float) -> None:
        """Delay each frame on a host's link, both ways, and lose a share of them."""
        self.unplug(host)
        _ip("-n", self._bridge, "link", "add", "slow", "type", "veth", "peer", "name", "port")
        _ip("-n", self._bridge, "link", "set", "port", "master", "br0")
        for name in ("slow", "port"):
            _ip("-n", self._bridge, "link", "set", name, "up")
        link = [sys.executable, str(Path(__file__).with_name("slow_link.py")), self.names[host], "slow"]
        command = ["ip", "netns", "exec", self._bridge, *link, str(delay_s), str(loss)]
        self._slow[host] = subprocess.Popen(command)

    def speed_up(self, host: int) -> None:
        """Undo `slow_down`."""
        slow = self._slow.pop(host)
        slow.kill()
        slow.wait()
        _ip("-n", self._bridge, "link", "delete", "slow")
        self.plug_in(host)

    def processes(self, host: int) -> list[psutil.Process]:
        """Return the processes of a host."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [psutil.Process(int(pid)) for pid in found.stdout.split() if psutil.pid_exists(int(pid))]

    def remove(self) -> None:
        """End all processes of the hosts, and remove the hosts."""
        for slow in self._slow.values():
            slow.kill()
            slow.wait()
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for name in [*self.names, self._bridge]:
            if name in there:
                if name in self.names:
                    self._end(self.names.index(name))
                _ip("netns", "delete", name)
        self._folder.cleanup()

    def _end(self, host: int) -> None:
        for _ in range(3):  # a process may just have started another
            processes = self.processes(host)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
