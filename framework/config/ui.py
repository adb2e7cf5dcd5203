"""``ui.*``: the page of a run."""

from __future__ import annotations

import socket
from typing import Annotated

from pydantic import Field, SecretStr, field_validator

from framework.config.section import Section, listed

#: The fewest characters of ``ui.token``.
TOKEN_MIN = 16


class UiConfig(Section):
    """Keys of ``ui.*``."""

    ui_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, alias="ui.port", description="The port where a run serves its page. Not set: nowhere."
    )
    ui_host: str = Field(
        "127.0.0.1",
        alias="ui.host",
        description="The address of the page. Any but a loopback address needs ui.token or ui.tls.client.ca.",
    )
    ui_token: SecretStr | None = Field(
        None,
        alias="ui.token",
        description="The token of viewers of the page, 16 characters or more. Secret: give it as ${NAME} from the environment.",
    )
    ui_allowed_hosts: tuple[str, ...] = Field(
        (),
        alias="ui.allowed.hosts",
        description="More names under which browsers reach the page, such as that of a proxy.",
    )
    ui_tls_certificate: str | None = Field(
        None, alias="ui.tls.certificate", description="A PEM file with the certificate of the page's server."
    )
    ui_tls_key: str | None = Field(None, alias="ui.tls.key", description="A PEM file with the key of that certificate.")
    ui_tls_client_ca: str | None = Field(
        None,
        alias="ui.tls.client.ca",
        description="A PEM file with the authorities that sign the certificates of viewers. If set, viewers need one.",
    )

    @field_validator("ui_allowed_hosts", mode="before")
    @classmethod
    def _listed_ui_hosts(cls, value: object) -> object:
        return listed(value)

    @field_validator("ui_token")
    @classmethod
    def _token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < TOKEN_MIN:
            raise ValueError(f"must have at least {TOKEN_MIN} characters")
        return value

    @property
    def ui_address(self) -> str | None:
        """The address of a run's page for browsers; None if it is not served."""
        if self.ui_port is None:
            return None
        host = socket.gethostname() if self.ui_host in ("0.0.0.0", "::") else self.ui_host
        scheme = "http" if self.ui_tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.ui_port}/"
