"""A Slurm cluster on hosts of this machine: the controller on the first, and a node on each."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from network_hosts import Hosts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
_PATIENCE_S = 60


def missing_programs() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Slurm:
    """A cluster that runs jobs as root, without authentication: these hosts have no other users."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        (folder / "state").mkdir(parents=True)
        name = os.uname().nodename
        nodes = [f"n{number}" for number in range(len(hosts.addresses))]
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={name}({hosts.addresses[0]})",
            "SlurmUser=root",
            "AuthType=auth/none",
            "CredType=cred/none",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/linear",
            "MpiDefault=none",
            "KillWait=5",
            "ReturnToService=2",
            *(
                f"NodeName={node} NodeHostname={name} NodeAddr={address} CPUs=1"
                for node, address in zip(nodes, hosts.addresses, strict=True)
            ),
            f"PartitionName=main Nodes={','.join(nodes)} Default=YES State=UP",
        ]
        self._configuration = folder / "slurm.conf"
        self._configuration.write_text("\n".join(lines) + "\n")
        hosts.start(0, ["slurmctld", "-D", "-c"], folder / "slurmctld.txt", SLURM_CONF=str(self._configuration))
        for host, node in enumerate(nodes):
            # `ip netns exec` would hide the control groups that slurmd needs.
            command = ["nsenter", f"--net=/run/netns/{hosts.names[host]}", "slurmd", "-D", "-N", node]
            with open(folder / f"{node}.txt", "ab") as log:
                environment = hosts.environment(SLURM_CONF=str(self._configuration))
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _PATIENCE_S
        while (states := self.run("sinfo", "--noheader", "--Node", "--format=%T")).split() != ["idle"] * len(nodes):
            assert time.monotonic() < deadline, states
            time.sleep(0.5)

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run a command on the first host; returns its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self._hosts.names[0], *command],
            cwd=folder,
            env=self._hosts.environment(SLURM_CONF=str(self._configuration)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, …"""
        shown = self.run("scontrol", "show", "job", job)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), shown)
