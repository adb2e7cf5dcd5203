"""``tracing.*``: where a run sends its traces."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from framework.config.section import Section


class TracingConfig(Section):
    """Keys of ``tracing.*``."""

    tracing_endpoint: str | None = Field(
        None,
        alias="tracing.otlp.endpoint",
        description="Where traces of transactions are sent by OTLP over HTTP, such as http://collector:4318/v1/traces. "
        "Not set: nowhere. Needs the extra otel.",
    )
    tracing_ratio: Annotated[float, Field(ge=0, le=1, strict=False)] = Field(
        1.0, alias="tracing.otlp.ratio", description="The share of transactions that are traced, from 0 to 1."
    )
