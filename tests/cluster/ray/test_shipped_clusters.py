"""The shipped configurations of clusters: Ray accepts them, and nothing that they start is open to others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from workplace import ROOT

CLUSTERS = ROOT / "docs" / "clusters"
FILES = [ROOT / "ray_cluster.yaml", CLUSTERS / "existing-machines.yaml"]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    path: Path = request.param
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    import ray.autoscaler
    from jsonschema import validate
    from ray.autoscaler.sdk import fillout_defaults

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    validate(config, schema)
    fillout_defaults(config)
    if config["provider"]["type"] != "local":  # which has one type that nobody names
        assert config["head_node_type"] in config["available_node_types"]


def test_each_node_has_the_token_and_the_dashboard_is_on_loopback(config: dict[str, Any]) -> None:
    head, worker = ("\n".join(config[f"{role}_start_ray_commands"]) for role in ("head", "worker"))
    for commands in (head, worker):
        starts = re.findall(r"(?m)^.*\bray start\b.*$", commands)
        assert starts and all("RAY_AUTH_MODE=token" in start and "RAY_AUTH_TOKEN_PATH" in start for start in starts)
    assert "--dashboard-host=127.0.0.1" in head and "--head" in head and "0.0.0.0" not in head + worker
    assert any(target.endswith("/.ray/auth_token") for target in config["file_mounts"])
    assert any("chmod 600" in command and "auth_token" in command for command in config["setup_commands"])
    assert "--constraint constraints.txt" in "\n".join(config["setup_commands"])


def test_the_checkout_is_sent_without_what_is_not_code(config: dict[str, Any]) -> None:
    assert "." in config["file_mounts"].values() and {".git", ".venv", "runs"} <= set(config["rsync_exclude"])


def test_a_job_on_kubernetes_has_the_cluster_that_is_shipped_for_it() -> None:
    cluster, policy = yaml.safe_load_all((CLUSTERS / "kuberay.yaml").read_text())
    job = yaml.safe_load((CLUSTERS / "kuberay-job.yaml").read_text())
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    assert cluster["spec"]["rayVersion"] == ray.__version__ and cluster["spec"]["authOptions"] == {"mode": "token"}
    templates = [
        group["template"] for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
    ]
    for template in templates:
        assert template["metadata"]["labels"].items() >= policy["spec"]["podSelector"]["matchLabels"].items()
        (container,) = template["spec"]["containers"]
        assert template["spec"]["securityContext"]["runAsNonRoot"] and "hostNetwork" not in template["spec"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert not any("TOKEN" in variable["name"] or "SECRET" in variable["name"] for variable in container["env"])
    head, *workers = (template["spec"]["containers"][0]["resources"]["limits"] for template in templates)
    assert "nvidia.com/gpu" not in head and all("nvidia.com/gpu" in limits for limits in workers)
    assert policy["spec"]["policyTypes"] == ["Ingress"] and all(rule["from"] for rule in policy["spec"]["ingress"])
