"""A driver's authentication to ZooKeeper: TLS, SASL or digest. Also explains why a running server
refuses it."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kazoo.security import CREATOR_ALL_ACL

from framework.config import Config, revealed
from framework.errors import ConfigError

_PREFIX = "transactional.zookeeper"
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperSecurity:
    """Credentials for ZooKeeper.

    * ``tls``: use TLS.
    * ``ca``: PEM file of the authority that must have signed the servers' certificates.
    * ``certificate``, ``key``: PEM files of this client's own; ``key_password`` is the key's.
    * ``username``, ``password``: for SASL (DIGEST-MD5).
    * ``digest``: ``user:password`` for ZooKeeper's own digest scheme.

    With any credentials, including a certificate, only their owner can access the znodes created.
    """

    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    digest: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: Config) -> ZooKeeperSecurity:
        """Read ``transactional.zookeeper.{auth,tls.*,sasl.*}``. Raises ``ConfigError`` as ``check``
        does."""
        found = cls(
            tls=config.zookeeper_tls_enabled,
            ca=config.zookeeper_tls_ca,
            certificate=config.zookeeper_tls_certificate,
            key=config.zookeeper_tls_key,
            key_password=revealed(config.zookeeper_tls_password),
            username=config.zookeeper_sasl_username,
            password=revealed(config.zookeeper_sasl_password),
            digest=_digest(revealed(config.zookeeper_auth)),
        )
        found.check()
        return found

    def check(self) -> None:
        """Raise ``ConfigError`` when a file does not exist, when a TLS file is given without TLS,
        and when only one half of a pair is given."""
        for name, file in (("ca", self.ca), ("certificate", self.certificate), ("key", self.key)):
            if file is None:
                continue
            if not self.tls:
                raise ConfigError(f"{_PREFIX}.tls.{name} is given, and {_PREFIX}.tls.enabled is not true: set it")
            if not Path(file).is_file():
                raise ConfigError(f"{_PREFIX}.tls.{name}: there is no file {file}")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(f"{_PREFIX}.tls.certificate and {_PREFIX}.tls.key go together: give both or none")
        if (self.username is None) != (self.password is None):
            raise ConfigError(f"{_PREFIX}.sasl.username and {_PREFIX}.sasl.password go together: give both or none")

    @property
    def has_credentials(self) -> bool:
        """Whether created znodes are accessible to their creator only."""
        return any(each is not None for each in (self.digest, self.username, self.certificate))

    def client_options(self) -> dict[str, Any]:
        """Options for kazoo's client."""
        options: dict[str, Any] = {}
        if self.digest is not None:
            options["auth_data"] = [("digest", self.digest)]
        if self.username is not None:
            options["sasl_options"] = {
                "mechanism": "DIGEST-MD5",
                "username": self.username,
                "password": self.password,
            }
        if self.has_credentials:
            options["default_acl"] = list(CREATOR_ALL_ACL)
        if self.tls:
            options |= {
                "use_ssl": True,
                "ca": self.ca,
                "certfile": self.certificate,
                "keyfile": self.key,
                "keyfile_password": self.key_password,
                "verify_certs": True,
                "check_hostname": True,
            }
        return options

    def explain(self, host: str, port: int) -> str | None:
        """Try a TLS handshake with a server. Return why the server refuses this client, or None
        when the handshake gives no reason."""
        if not self.tls:
            return None
        try:
            with socket.create_connection((host, port), _PROBE_TIMEOUT_S) as connection:
                context = ssl.create_default_context(cafile=self.ca)
                if self.certificate is not None:
                    context.load_cert_chain(self.certificate, self.key, self.key_password or "")
                with context.wrap_socket(connection, server_hostname=host) as secure:
                    secure.settimeout(1.0)
                    secure.recv(1)  # TLS 1.3: a server refuses a certificate after the handshake
        except ssl.SSLCertVerificationError as error:
            return f"{host}:{port}: its certificate is not accepted: {error.verify_message}; check {_PREFIX}.tls.ca"
        except TimeoutError:
            return None
        except ssl.SSLError as error:
            what = error.reason or str(error)
            hint = f"check {_PREFIX}.tls.certificate, .key and .password, and that this port is the one for TLS"
            return f"{host}:{port}: TLS fails: {what}; {hint}"
        except OSError:
            return None
        return None


def _digest(auth: str | None) -> str | None:
    """Strip the scheme from ``digest:user:password``."""
    return auth.partition(":")[2] if auth is not None else None
