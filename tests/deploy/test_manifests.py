"""The manifests of ``deploy/kubernetes`` are ones that a cluster takes, and that Ratchet takes."""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from framework import Config
from framework.config import flatten
from tests.kit.processes import ROOT

MANIFESTS = ROOT / "deploy" / "kubernetes"


def documents() -> dict[str, Any]:
    found = list(yaml.safe_load_all((MANIFESTS / "ratchet.yaml").read_text()))
    return {each["kind"]: each for each in found}


@pytest.mark.parametrize("version", ["1.30", "1.34"])
@pytest.mark.parametrize("kind", sorted(documents()))
def test_a_manifest_is_as_the_schema_of_its_kind_says(kind: str, version: str) -> None:
    document = documents()[kind]
    kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "metadata": {"nam": "x"}}, version, strict=True)


def test_the_configuration_in_the_manifest_is_one_and_fits_the_rest_of_it() -> None:
    found = documents()
    config = Config.of(flatten(tomllib.loads(found["ConfigMap"]["data"]["orders.toml"])))
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": config.metrics_port}]
    assert config.metrics_host == "0.0.0.0"
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    monitor = yaml.safe_load((MANIFESTS / "servicemonitor.yaml").read_text())
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [found["Service"]["spec"]["ports"][0]["name"]]


def test_the_network_policy_opens_what_the_configuration_needs_and_nothing_else() -> None:
    found = documents()
    policy = found["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (into,) = policy["ingress"]
    assert [port["port"] for port in into["ports"]] == [port["name"] for port in container["ports"]]
    config = Config.of(flatten(tomllib.loads(found["ConfigMap"]["data"]["orders.toml"])))
    servers = {int(address.rpartition(":")[2]) for address in (*config.zookeeper_servers, "kafka:9092")}
    out = {port["port"] for each in policy["egress"] for port in each["ports"]}
    assert out == {53, 5432, *servers}  # names, PostgreSQL


def test_the_pods_have_no_rights_that_they_do_not_need() -> None:
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    context = {**pod["securityContext"], **container["securityContext"]}
    assert context == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
    (scratch,) = (each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each)
    assert scratch["sizeLimit"] == container["resources"]["limits"]["ephemeral-storage"]


def test_every_image_that_something_is_built_on_or_deployed_from_has_a_digest() -> None:
    """A tag may name another image tomorrow."""
    dockerfile = (ROOT / "deploy/image/Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    bases = [name for name in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) if name not in stages]
    assert bases == ["${BASE}"]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    (container,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for image in (base, container["image"]):
        assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image), image


def test_only_root_may_read_the_file_with_the_secrets_of_a_service(tmp_path: Path) -> None:
    """By the commands of the documentation, with the usual umask."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    commands = [line.replace("/etc/ratchet", str(tmp_path / "etc")) for line in page.splitlines() if ".env" in line]
    commands = [each for each in commands if each.startswith(("install ", "echo "))]
    subprocess.run(["sh", "-ec", "umask 022\n" + "\n".join(commands)], check=True)
    file = tmp_path / "etc" / "orders.env"
    assert file.read_text() == "TOPOLOGY=pipeline:topology\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
