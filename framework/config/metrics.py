"""``metrics.*``: where a run serves its metrics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from framework.config.section import Section, listed


class MetricsConfig(Section):
    """Keys of ``metrics.*``."""

    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, alias="metrics.prometheus.port", description="The port where metrics are served. Not set: nowhere."
    )
    metrics_host: str = Field(
        "127.0.0.1", alias="metrics.prometheus.host", description="The address where metrics are served."
    )
    metrics_allowed_hosts: tuple[str, ...] = Field(
        (),
        alias="metrics.prometheus.allowed.hosts",
        description="More host names for requests of metrics, such as that of a service.",
    )

    @field_validator("metrics_allowed_hosts", mode="before")
    @classmethod
    def _listed_metrics_hosts(cls, value: object) -> object:
        return listed(value)
