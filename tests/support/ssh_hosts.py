"""sshd on hosts of `network_hosts`, each with processes and a home of its own that others do not see."""

import getpass
import shutil
import subprocess
import time
from pathlib import Path

from network_hosts import Hosts

_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "mount")


def missing_programs() -> list[str]:
    """Return the programs for it that this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


class SshHosts:
    """sshd on the hosts in `wanted`, which all accept the same key for this user."""

    def __init__(self, hosts: Hosts, wanted: list[int], folder: Path) -> None:
        self.user, self.key = getpass.getuser(), folder / "key"
        self._hosts, self._folder = hosts, folder
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        for host in wanted:
            # Real machines have a default route, and Ray takes the address from which it would reach the internet.
            _run("ip", "-n", hosts.names[host], "route", "add", "default", "dev", "eth0")
            self._start(host)
        for host in wanted:
            self._wait(host)

    def run(self, host: int, command: str, on: int = 0) -> str:
        """Run a command on a host, by ssh from another; returns its output."""
        return _run(*self.command(host, on), command)

    def command(self, host: int, on: int = 0) -> list[str]:
        """Return the beginning of an ssh command to a host."""
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        where = f"{self.user}@{self._hosts.addresses[host]}"
        return ["ip", "netns", "exec", self._hosts.names[on], "ssh", "-i", str(self.key), *options, where]

    def _start(self, host: int) -> None:
        folder = self._folder / f"host-{host}"
        for name in ("changes", "work"):
            (folder / name).mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        (folder / "sshd_config").write_text(
            f"ListenAddress {self._hosts.addresses[host]}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.key}.pub\nStrictModes no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nMaxStartups 100\n"
        )
        home = Path.home()
        # Homes are layers above the real one, which is not written to. Ray's folder, in which it notes the state of
        # clusters, is the host's own, and `ray stop` sees only this host's processes.
        script = " && ".join(
            (
                f"mount -t overlay overlay -o lowerdir={home},upperdir={folder}/changes,workdir={folder}/work {home}",
                f"rm -rf {home}/.ray",
                "mkdir -p /tmp/ray /run/sshd",
                "mount -t tmpfs tmpfs /tmp/ray",
                f"exec {shutil.which('sshd')} -D -e -f {folder}/sshd_config",
            )
        )
        unshared = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
        self._hosts.start(host, unshared, folder / "sshd.txt")

    def _wait(self, host: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.run(host, "true")
                return
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise AssertionError((self._folder / f"host-{host}" / "sshd.txt").read_text()) from None
                time.sleep(0.5)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
