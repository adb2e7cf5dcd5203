"""The manifests of ``deploy/kubernetes`` are ones that a cluster takes, and that Ratchet takes."""

from __future__ import annotations

import tomllib
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
    ):
        assert selector == labels
    monitor = yaml.safe_load((MANIFESTS / "servicemonitor.yaml").read_text())
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [found["Service"]["spec"]["ports"][0]["name"]]
