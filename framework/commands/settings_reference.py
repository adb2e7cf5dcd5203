"""``ratchet config`` and ``ratchet metrics``: the configuration keys, and the metrics."""

from __future__ import annotations

import difflib
import json
import types
import typing
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from framework.commands.exit_status import exit_codes
from framework.commands.options import AsJson
from framework.config import Config
from framework.errors import ConfigError

config_app = typer.Typer(pretty_exceptions_enable=False)
metrics_app = typer.Typer(pretty_exceptions_enable=False)

#: Keys that are passed on unchanged.
PREFIXES = {
    "app.*": "The user's own: what a topology function gets, and components see in conf.",
    "kafka.*": "Settings of every Kafka client, by librdkafka's names; and kafka.reader, kafka.aws.region.",
    "spark.*": "Settings of Spark, such as spark.master.",
}


@config_app.command()
def show_config(
    key: Annotated[str | None, typer.Argument(help="One key, or the beginning of several; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the configuration keys: their types, defaults and meaning."""
    with exit_codes():
        found = [each for each in config_keys() if key is None or each["key"].startswith(key)]
        if not found:
            near = difflib.get_close_matches(key or "", [each["key"] for each in config_keys()], n=1)
            raise ConfigError(f"there is no key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        for each in found:
            if as_json:
                typer.echo(json.dumps({"type": "config", **each}))
            else:
                typer.echo(f"{each['key']}\n    {each['kind']}, default {each['default']}\n    {each['text']}")


@metrics_app.command()
def show_metrics(as_json: AsJson = False) -> None:
    """Explain the metrics that a run serves at metrics.prometheus.port."""
    from framework.observe.metrics import METRICS  # imports the library of metrics

    for each in METRICS.values():
        labels = ", ".join(each.labels)
        if as_json:
            document = {
                "type": "metric",
                "metric": each.name,
                "kind": each.kind,
                "labels": each.labels,
                "text": each.text,
            }
            typer.echo(json.dumps(document))
        else:
            typer.echo(f"{each.name}\n    {each.kind} by {labels}\n    {each.text}")


def config_keys() -> list[dict[str, str]]:
    """Each key with its type, default and meaning, for display."""
    keys = [
        {
            "key": field.alias,
            "kind": _kind(field.annotation),
            "default": _default(field.default if field.default_factory is None else {}),
            "text": field.description or "",
        }
        for field in Config.model_fields.values()
        if field.alias is not None
    ]
    handed_on = [{"key": key, "kind": "any", "default": "not set", "text": text} for key, text in PREFIXES.items()]
    return sorted(keys, key=lambda each: each["key"]) + handed_on


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return "not set"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(annotation: Any) -> str:
    names = {
        int: "whole number",
        float: "number",
        bool: "true or false",
        str: "text",
        SecretStr: "text",
        tuple: "list of texts",
        types.NoneType: "",
    }
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(each) for each in typing.get_args(annotation)]
        return " or ".join(dict.fromkeys(each for each in kinds if each))
    if origin is Annotated:
        return _kind(typing.get_args(annotation)[0])
    return names.get(origin or annotation, "table")
