"""The alert rules and the board: they use what is served, and the rules do what they say."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from framework.observe.metrics import METRICS
from integration.server_programs import find_program

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "ratchet-alerts.yml"
RULE_TESTS = DEPLOY / "prometheus" / "ratchet-alerts-test.yml"
BOARD = DEPLOY / "grafana" / "ratchet.json"
SERIES = {series: each for each in METRICS.values() for series in each.series}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries_of_the_board() -> list[str]:
    board = json.loads(BOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def series_in(query: str) -> set[str]:
    return set(re.findall(r"\bratchet_\w+", query))


def labels_in(query: str) -> Iterator[tuple[str, str]]:
    """Each series of a query with the labels that select it."""
    for series, selected in re.findall(r"\b(ratchet_\w+)\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*=", selected):
            yield series, label


def test_every_metric_that_is_used_exists_with_its_labels() -> None:
    for query in [*(each["expr"] for each in alerts()), *queries_of_the_board()]:
        assert series_in(query) <= SERIES.keys(), query
        for series, label in labels_in(query):
            assert label in (*SERIES[series].labels, "le"), query


def test_every_metric_is_on_the_board() -> None:
    used = {SERIES[series].name for query in queries_of_the_board() for series in series_in(query)}
    assert used == METRICS.keys()


def test_every_panel_asks_a_question_and_none_covers_another() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith((".", "?")), panel["title"]


def unknown(written: Any, read: Any, path: str = "board") -> Iterator[str]:
    """Where a document has something that a reader of it has lost, or understood as something
    else."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from unknown(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from unknown(one, other, f"{path}[{number}]")
    elif written != read:
        yield path


def as_grafana_reads_it(board: Any) -> Any:
    """A board as the classes made from Grafana's schema hold it: they drop what they do not
    know."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def test_the_board_has_only_what_grafanas_schema_knows() -> None:
    board = json.loads(BOARD.read_text())
    # Which the data source reads, and the schema of all data sources leaves out.
    assert list(unknown(board, as_grafana_reads_it(board))) == ["board.annotations.list[0].titleFormat"]
    panel = next(each for each in board["panels"] if each["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["fillOpacty"] = panel["fieldConfig"]["defaults"]["custom"].pop(
        "fillOpacity", 10
    )
    assert any(each.endswith("custom.fillOpacty") for each in unknown(board, as_grafana_reads_it(board)))


def test_every_alert_says_what_it_means_and_has_a_test_that_fires_it() -> None:
    cases = [case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for alert in alerts():
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        own = [case for case in cases if case["alertname"] == alert["alert"]]
        assert any(case["exp_alerts"] for case in own), alert["alert"]
        assert any(not case["exp_alerts"] for case in own), alert["alert"]
    assert {case["alertname"] for case in cases} == {alert["alert"] for alert in alerts()}


@pytest.mark.slow  # Debian's package of Prometheus is installed for it
def test_the_rules_fire_as_their_tests_say() -> None:
    tool = find_program("promtool", "prometheus")
    for what in (["check", "rules", RULES.name], ["test", "rules", RULE_TESTS.name]):
        done = subprocess.run([tool, *what], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
