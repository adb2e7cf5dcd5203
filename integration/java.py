"""Java, which embedded servers run on."""

from __future__ import annotations

from framework.clients import java
from framework.errors import ConfigError
from integration.errors import ServerError


def find_java() -> str:
    """The path of a Java that is new enough. Raises ``ServerError``."""
    try:
        return java.find_java()
    except ConfigError as error:
        raise ServerError(str(error)) from None
