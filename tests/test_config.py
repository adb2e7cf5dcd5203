"""Configuration: eager, typed, and every complaint names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import Config
from framework.errors import ConfigError


def test_defaults_are_those_of_storm() -> None:
    config = Config.of({})
    assert (config.max_spout_pending, config.message_timeout_secs) == (1, 30.0)
    assert config.zookeeper_hosts() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topology.max.spout.pendign": 2}, r"'topology.max.spout.pendign': did you mean 'topology.max.spout.pending'"),
        ({"nonsense": 2}, r"unknown key 'nonsense': the known keys are .*topology.message.timeout.secs"),
        ({"topology.max.spout.pending": 0}, r"topology.max.spout.pending: .*greater than or equal to 1, not 0"),
        ({"topology.max.spout.pending": -3}, r"topology.max.spout.pending: "),
        ({"topology.max.spout.pending": 10**9}, r"topology.max.spout.pending: .*less than"),
        ({"topology.max.spout.pending": "four"}, r"topology.max.spout.pending: .*integer, not 'four'"),
        ({"topology.max.spout.pending": True}, r"topology.max.spout.pending: "),
        ({"topology.message.timeout.secs": 0}, r"topology.message.timeout.secs: .*greater than 0"),
        ({"transactional.zookeeper.port": 70_000}, r"transactional.zookeeper.port: "),
        ({"transactional.zookeeper.root": "relative"}, r"transactional.zookeeper.root: must be an absolute path"),
        ({"transactional.zookeeper.root": "/a/../b"}, r"transactional.zookeeper.root: "),
        ({"transactional.zookeeper.auth": "canary"}, r"zookeeper.auth: must be digest:user:password; [^']+$"),
        *(
            pytest.param(values, message, marks=pytest.mark.rule("C10"))
            for values, message in (
                ({"spark.task.maxFailures": 4}, r"spark.task.maxFailures cannot be set: Spark must repeat nothing"),
                ({"spark.stage.maxConsecutiveAttempts": 4}, r"spark.stage.maxConsecutiveAttempts cannot be set"),
                ({"spark.speculation": True}, r"spark.speculation cannot be set"),
                ({"spark.master": "local[2,4]"}, r"local\[N,F\] repeats failed tasks; use local\[2\]"),
            )
        ),
    ],
)
def test_bad_values_are_refused_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.of(values)


def test_zookeeper_servers_without_a_port_get_the_configured_one() -> None:
    config = Config.of({"transactional.zookeeper.servers": ["a", "b:2182"], "transactional.zookeeper.port": 2200})
    assert config.zookeeper_hosts() == "a:2200,b:2182"
    assert Config.of({"transactional.zookeeper.servers": "a, b"}).zookeeper_hosts() == "a:2181,b:2181"


def test_toml_tables_become_dotted_keys_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[topology]\nmax.spout.pending = 4\n"message.timeout.secs" = 10\n[app]\nkafka = "h:1"\n')
    config = Config.load(file, ["topology.max.spout.pending=2", "app.database=x.db", "spark.ui.enabled=true"])
    assert (config.max_spout_pending, config.message_timeout_secs) == (2, 10)
    assert dict(config.app) == {"app.kafka": "h:1", "app.database": "x.db"}
    assert dict(config.spark) == {"spark.ui.enabled": "true"}


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such configuration file"), ("a = ", "run.toml: "), (b"\xff", "run.toml: ")]
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        Config.load(file)


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="write KEY=VALUE"):
        Config.load(None, ["topology.max.spout.pending"])


def test_secrets_are_not_shown_and_do_not_reach_components() -> None:
    config = Config.of({"transactional.zookeeper.auth": "digest:me:canary"})
    assert "canary" not in repr(config)
    assert "canary" not in str(config.for_components())
