"""A run over three hosts that loses several things at once: two of its hosts, and its driver with a host."""

from pathlib import Path

import pytest
from host_runs import RAY, SAME_BUT_FOR_ROUNDING, assert_as_undisturbed, begin_on_all, sizes, train, wait_for
from network_hosts import Hosts
from workplace import json_lines, losses

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]
OVERRIDES = (*SAME_BUT_FOR_ROUNDING, "cluster.workers=[1, 3]", "engine.hang_timeout_s=20")


def test_it_goes_on_with_what_is_left(three_hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    hosts, run, output = three_hosts, tmp_path / "runs" / "two", tmp_path / "output.txt"
    driver = begin_on_all(hosts, texts, tmp_path, 100_000, *OVERRIDES)

    def goes_on(ranks: int, launches: int) -> int:
        """Until a launch after the first `launches` has as many ranks, and has made some steps; number of launches."""
        wait_for(lambda: ranks in sizes(run)[launches:], output)
        begun = max(losses(run), default=0)
        wait_for(lambda: max(losses(run), default=0) > begun + 30, output)
        assert sizes(run)[-1] == ranks, output.read_text()
        return len(sizes(run))

    def restore(host: int) -> None:
        hosts.restore_power(host)
        hosts.start_ray(host, tmp_path / f"ray-start-{host}.txt", cpus=1, **RAY)

    launches = goes_on(3, 0)
    for host in (1, 2):
        hosts.lose_power(host)
    launches = goes_on(1, launches)
    for host in (1, 2):
        restore(host)
    launches = goes_on(3, launches)

    driver.kill()
    hosts.lose_power(1)
    driver.wait()
    driver = train(hosts, tmp_path, *OVERRIDES)
    launches = goes_on(2, launches)
    restore(1)
    goes_on(3, launches)

    driver.terminate()
    assert driver.wait(timeout=100) == 75, output.read_text()
    print([(row["world_size"], row["step"]) for row in json_lines(run / "launches.jsonl")])
    assert_as_undisturbed(hosts, tmp_path, run)
