"""docs/clusters/existing-machines.yaml, brought up over ssh on hosts of this machine."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from network_hosts import ROOT, Hosts
from ssh_hosts import SshHosts, missing_programs
from workplace import make_workplace

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]
HERE, HEAD, WORKER = 0, 1, 2
URL = "http://127.0.0.1:8265"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)} (Debian's packages openssh-server, openssh-client and rsync)")
    try:
        found = Hosts(3)
    except OSError as error:
        pytest.skip(f"this machine or user cannot make network namespaces: {error}")
    yield found
    found.remove()


def test_the_shipped_configuration_is_brought_up_used_and_taken_down(hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    ssh = SshHosts(hosts, [HEAD, WORKER], tmp_path)
    checkout, home = tmp_path / "checkout", tmp_path / "home"
    checkout.mkdir()
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    # The machines have it installed already: what set-up would install is what these tests run with.
    for host in (HEAD, WORKER):
        ssh.run(host, f"mkdir -p ~/multihop && ln -s {Path(sys.executable).parents[1]} ~/multihop/.venv")
        ssh.run(host, "touch ~/.multihop-constraints.txt")
    config = yaml.safe_load((ROOT / "docs" / "clusters" / "existing-machines.yaml").read_text())
    config["cluster_name"] = f"test-{secrets.token_hex(4)}"  # Ray remembers clusters by name
    config["provider"] |= {"head_ip": hosts.addresses[HEAD], "worker_ips": [hosts.addresses[WORKER]]}
    config["min_workers"] = 0  # the run asks for the other host
    config["auth"] = {"ssh_user": ssh.user, "ssh_private_key": str(ssh.key)}
    (checkout / "cluster.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (checkout / "constraints.txt").touch()

    def here(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "RAY_AUTH_MODE": "token", **changes}
        there = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return subprocess.run(
            ["ip", "netns", "exec", hosts.names[HERE], *command],
            cwd=checkout,
            env={**there, **environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )

    up = here("ray", "up", "--yes", "--no-config-cache", "cluster.yaml")
    assert up.returncode == 0, up.stdout + up.stderr
    forward = hosts.start(HERE, [*ssh.command(HEAD)[4:], "-N", "-L", "8265:127.0.0.1:8265"], tmp_path / "forward.txt")
    multihop = (sys.executable, "-m", "multihop.cluster.cli.main")
    try:
        assert "1 alive" in ssh.run(HEAD, _COUNT)
        make_workplace(checkout, texts, "small", 20)
        recipe = yaml.safe_load((checkout / "recipe.yaml").read_text())
        recipe["data"]["sources"] = [{"path": str(texts.absolute())}]
        (checkout / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        submit = [*multihop, "submit", "recipe.yaml", "--runs", str(tmp_path / "runs"), "--stage", "train"]
        for refused in (submit, [*multihop, "jobs"], [*multihop, "logs", "small"], [*multihop, "stop", "small"]):
            for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "00" * 32}):
                done = here(*refused, "--address", URL, **wrong)
                assert done.returncode == 2 and "token" in done.stderr, done.stdout + done.stderr
        cpus = os.cpu_count() or 1
        done = here(*submit, "--address", URL, f"cluster.workers={cpus + 1}", "phases[0].global_batch_size=16")
        assert done.returncode == 0 and "20/20" in done.stdout, done.stdout + done.stderr
        assert "waiting for nodes since" in done.stdout and "2 alive" in ssh.run(HEAD, _COUNT)
    finally:
        forward.kill()
        forward.wait()
    # The dashboard is reached through the tunnel alone.
    assert "refused" in here("bash", "-c", f"exec 3<>/dev/tcp/{hosts.addresses[HEAD]}/8265").stderr
    stopped = here("ray", "exec", "cluster.yaml", "~/multihop/.venv/bin/ray stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    down = here("ray", "down", "--yes", "cluster.yaml")
    assert down.returncode == 0, down.stdout + down.stderr
    deadline = time.monotonic() + 300  # a node without its head ends by itself
    while "raylet" in (left := ssh.run(HEAD, "ps -e -o comm") + ssh.run(WORKER, "ps -e -o comm")):
        assert time.monotonic() < deadline, left
        time.sleep(2)
    shutil.rmtree(checkout)


_COUNT = (
    "PATH=$HOME/multihop/.venv/bin:$PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token python -c "
    "\"import ray; ray.init('auto', logging_level='ERROR', log_to_driver=False); "
    "print(sum(node['Alive'] for node in ray.nodes()), 'alive')\""
)
