"""The configuration of a run: all sections together, checked completely before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from framework.config.environment_references import resolved
from framework.config.kafka import kafka_environment, kafka_settings
from framework.config.metrics import MetricsConfig
from framework.config.secret_redaction import hides, shown_mistake, shown_value
from framework.config.server_addresses import AddressConfig, address_environment
from framework.config.spark import spark_settings
from framework.config.toml import read_file, read_override
from framework.config.topology import TopologyConfig, gathered_provider_config
from framework.config.tracing import TracingConfig
from framework.config.ui import UiConfig
from framework.config.zookeeper import ZooKeeperConfig
from framework.errors import ConfigError


# Fields are in the order of their bases, the last one first.
class Config(UiConfig, TracingConfig, MetricsConfig, AddressConfig, ZooKeeperConfig, TopologyConfig):
    """A validated configuration. Build it with ``Config.of`` or ``Config.load``.

    >>> Config.of({"topology.max.spout.pending": 4}).max_spout_pending
    4
    >>> Config.of({"topology.max.spout.pendign": 4})
    Traceback (most recent call last):
    ...
    framework.errors.ConfigError: unknown key 'topology.max.spout.pendign': did you mean 'topology.max.spout.pending'?
    """  # noqa: W505 - doctest lines are not wrapped

    spark: Mapping[str, str] = Field(default_factory=dict, repr=False)
    kafka: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    app: Mapping[str, Any] = Field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, values: Mapping[str, Any] | Config) -> Config:
        """Check a flat mapping of dotted keys. Raises ``ConfigError`` for the first key that is
        unknown or must not be set, otherwise one that names every value that does not fit."""
        if isinstance(values, Config):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"the configuration is {values!r}: give a mapping, as in {{'topology.max.spout.pending': 4}}"
            )
        values = gathered_provider_config(values)
        spark, kafka = spark_settings(values), kafka_settings(values)
        app = {key: value for key, value in values.items() if key.startswith("app.")}
        rest = {key: value for key, value in values.items() if key not in spark and key not in app and key not in kafka}
        known = [field.alias for field in cls.model_fields.values() if field.alias]
        for key in rest:
            if key not in known:
                raise ConfigError(f"unknown key {key!r}: {_suggestion(key, known)}")
        try:
            return cls(**rest, spark=spark, kafka=kafka, app=app)
        except ValidationError as error:
            problems = [
                f"{'.'.join(str(part) for part in each['loc'])}: {each['msg'].removeprefix('Value error, ')}"
                + shown_mistake(".".join(map(str, each["loc"])), each["input"])
                for each in error.errors(include_url=False)
            ]
            raise ConfigError("; ".join(problems)) from None

    @classmethod
    def load(cls, path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
        """Read a TOML file, whose nested tables become dotted keys, and ``KEY=VALUE`` overrides,
        whose values are TOML or plain text. Raises ``ConfigError``.

        ``${NAME}`` in a value stands for an environment variable. An environment variable such as
        ``RATCHET_KAFKA_SASL_PASSWORD`` sets a ``kafka.*`` key, here ``kafka.sasl.password``, and
        ``RATCHET_POSTGRES_URL`` sets ``postgres.url``. Use both for secrets, which belong neither
        in files nor in command lines. The file wins over such variables; overrides win over the
        file.
        """
        values: dict[str, Any] = {
            **kafka_environment(),
            **address_environment(),
            **(read_file(path) if path is not None else {}),
        }
        values.update(read_override(each) for each in overrides)
        return cls.of({key: resolved(key, value) for key, value in values.items()})

    def with_defaults(self, values: Mapping[str, Any]) -> Config:
        """This configuration with these values for keys that are not set. Raises ``ConfigError`` as
        ``of``."""
        if not values:
            return self
        given = Config.of(values)
        missing = given.model_fields_set - self.model_fields_set - {"spark", "kafka", "app"}
        return self.model_copy(update={name: getattr(given, name) for name in missing})

    def shown(self) -> list[tuple[str, str, bool]]:
        """Key, value and whether it was set, for every key of Ratchet and every other key that was
        set, for display. Possible secrets are hidden, including each text of ``app.*``, because
        these are the user's own and may contain anything."""
        rows = []
        for name, each in type(self).model_fields.items():
            if each.alias is not None:
                value = getattr(self, name)
                rows.append((each.alias, shown_value(each.alias, value), name in self.model_fields_set))
        given = {**self.spark, **self.kafka, **self.app}
        return sorted(rows) + [(key, shown_value(key, given[key]), True) for key in sorted(given)]

    def for_components(self) -> dict[str, Any]:
        """The configuration that components get as ``conf``. Secrets of ``kafka.*`` are wrapped, so
        that they do not print. Secrets of ZooKeeper are left out."""
        visible = {alias: getattr(self, name) for name, alias in _visible_fields(type(self))}
        return {**visible, **self.kafka, **self.app}


@cache
def _visible_fields(config: type[Config]) -> list[tuple[str, str]]:
    """The fields that components get, each with its key."""
    fields = config.model_fields.items()
    return [(name, each.alias) for name, each in fields if each.alias and not hides(each.alias)]


def _suggestion(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return (
        f"did you mean {near[0]!r}?"
        if near
        else f"the known keys are {', '.join(sorted(known))}, spark.*, kafka.* and app.*"
    )
