"""The configuration of a run: typed, checked completely before anything starts, with unknown keys
refused.

Keys are Storm's where Storm has one. ``spark.*`` goes to Spark as it is, except for settings that
would break a guarantee. ``kafka.*`` goes to Kafka's clients under librdkafka's names. ``app.*`` is
the user's own and reaches components through ``conf``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from framework.errors import ConfigError
from framework.paths import local_path

#: Keys that go to Kafka clients as they are, under librdkafka's names.
KAFKA_PREFIX = "kafka."
#: ``topology.max.spout.pending``: its limit for transactions, and its default for the tuples of a
#: core topology.
TRANSACTIONS_PENDING_MAX = 1_000
TUPLES_PENDING = 10_000
#: Prefix of environment variables that set ``kafka.*``: RATCHET_KAFKA_SASL_PASSWORD sets
#: kafka.sasl.password.
KAFKA_ENVIRONMENT = "RATCHET_KAFKA_"
#: A setting whose name contains one of these may hold a secret.
_SECRET_FRAGMENTS = (
    "password",
    "secret",
    "key.pem",
    "jaas",
    "token",
    "credential",
    "oauthbearer.config",
    "private.key",
    "account.key",
)
#: The fewest characters of ``ui.token``.
TOKEN_MIN = 16
#: What is shown in place of a value that may be a secret.
HIDDEN = "(hidden)"
_PROVIDER_CONFIG = "topology.state.provider.config"
#: In a value: a URL with a password, or a password among other settings. In a key of Spark: what
#: Spark itself hides, and keys of object stores.
_CREDENTIALS = re.compile(r"://[^@\s]*@|passw|secret|token", re.IGNORECASE)
_SPARK_SECRET = re.compile(r"access.?key|account.?key|sas\b|auth|javaoptions", re.IGNORECASE)
#: In an address: a host, perhaps with a port; and who logs in, up to the next address.
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_USER = re.compile(r"://(?:(?!,https?://)\S)*@")
#: A server of ZooKeeper: a name or an address, with IPv6 in brackets, perhaps with a port.
_ZOOKEEPER_SERVER = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]+))?")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

#: Spark settings that the protocol depends on (C10), each with the reason.
_SPARK_FIXED = {
    "spark.task.maxFailures": "Spark must repeat nothing inside an attempt; Ratchet replays the batch",
    "spark.stage.maxConsecutiveAttempts": "Spark must repeat nothing inside an attempt; Ratchet replays the batch",
    "spark.speculation": "a speculative task would write twice",
    "spark.scheduler.mode": "commits need a pool of their own",
}


class Config(BaseModel):
    """A validated configuration. Build it with ``Config.of`` or ``Config.load``.

    >>> Config.of({"topology.max.spout.pending": 4}).max_spout_pending
    4
    >>> Config.of({"topology.max.spout.pendign": 4})
    Traceback (most recent call last):
    ...
    framework.errors.ConfigError: unknown key 'topology.max.spout.pendign': did you mean 'topology.max.spout.pending'?
    """  # noqa: W505 - doctest lines are not wrapped

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    spout_pending: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None,
        alias="topology.max.spout.pending",
        description="Transactions that are processed at once, 1 by default; of a core topology the tuples of each spout "
        "task whose fate is open, 10,000 by default.",
    )
    acker_executors: Annotated[int, Field(ge=0, le=1_000)] = Field(
        1,
        alias="topology.acker.executors",
        description="Acker tasks of a core topology; 0 tracks no tuple: each is acked when it is emitted.",
    )
    message_timeout_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] = Field(
        30.0,
        alias="topology.message.timeout.secs",
        description="Seconds an attempt, or a tuple tree of a core topology, may take before it fails and is replayed.",
    )
    start_timeout_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] = Field(
        15.0,
        alias="topology.start.timeout.secs",
        description="Seconds that a first start waits for servers that do not answer: their address may be wrong. Later "
        "starts wait as a running topology does.",
    )
    tick_tuple_freq_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] | None = Field(
        None,
        alias="topology.tick.tuple.freq.secs",
        description="Seconds between tick tuples for every bolt of a core topology; a bolt's own tick_s wins. Not set: no ticks.",
    )
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        5,
        alias="topology.max.attempts",
        description="Attempts at one transaction, or recoveries in a row, before the topology stops with the last error.",
    )
    bad_record_errors: bool = Field(
        False,
        alias="topology.bad.record.errors",
        description="Whether any error of a bolt that one record causes makes it a bad record, after topology.max.attempts "
        "(transactional topologies, where the spout has on_bad_record='skip' or 'dead_letter').",
    )
    idle_poll_max_ms: Annotated[int, Field(ge=1, le=60_000)] = Field(
        100,
        alias="topology.spout.idle.poll.max.ms",
        description="Longest pause between two looks at a source that has nothing, in milliseconds. A wide source "
        "is asked less often, by what asking costs: up to every 2 seconds. A source that says when something has "
        "come, as Kafka does, is asked once a second.",
    )
    emit_empty_batches: bool = Field(
        False,
        alias="topology.spout.emit.empty.batches",
        description="Whether an idle source makes empty batches, so that bolts and sinks see time pass.",
    )
    empty_batch_every_ms: Annotated[int, Field(ge=1, le=3_600_000)] = Field(
        500,
        alias="topology.trident.batch.emit.interval.millis",
        description="Milliseconds between two empty batches of an idle source.",
    )
    collapse_records_max: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        20_000,
        alias="topology.collapse.records.max",
        description="Batches, or rounds, of up to so many records run as one Spark task; 0 spreads all of them.",
    )
    collapse_resident: bool = Field(
        True,
        alias="topology.collapse.resident",
        description="Whether a Spark task stays for such batches and keeps its slot meanwhile; false: each is a job of its own.",
    )
    history_table: str | None = Field(
        None,
        alias="topology.history.table",
        description="A table that keeps the record of each closed transaction for good: sqlite:PATH, or "
        "postgresql://USER@HOST/DATABASE; #NAME at its end is the name of the table, by default history_ and the id of the "
        "topology. Not set: the last thousand are kept, in ZooKeeper. Give a password as ${NAME} from the environment.",
    )
    state_provider: str = Field(
        "framework.state.InMemoryKeyValueStateProvider",
        alias="topology.state.provider",
        description="The class that keeps the state of stateful bolts.",
    )
    state_provider_config: Mapping[str, Any] | str = Field(
        default_factory=dict,
        alias="topology.state.provider.config",
        description="The provider's own settings, as a table or as JSON.",
    )
    checkpoint_interval_ms: Annotated[int, Field(ge=1, le=86_400_000)] = Field(
        1_000,
        alias="topology.state.checkpoint.interval.ms",
        description="Milliseconds between two checkpoints of the state.",
    )
    state_exactly_once: bool = Field(
        True,
        alias="topology.state.exactly.once",
        description="Whether state counts each record once; false spares the spouts going back: at least once then.",
    )
    zookeeper_servers: tuple[str, ...] = Field(
        (),
        alias="transactional.zookeeper.servers",
        description="ZooKeeper servers, a list of host or host:port, the last one perhaps with a chroot, as in zk3:2181/team. "
        "Not set: the state ends with the process.",
    )
    zookeeper_port: Annotated[int, Field(ge=1, le=65_535)] = Field(
        2181, alias="transactional.zookeeper.port", description="The port of servers that are given without one."
    )
    zookeeper_root: str = Field(
        "/ratchet", alias="transactional.zookeeper.root", description="The path below which all topologies are kept."
    )
    zookeeper_session_timeout_secs: Annotated[float, Field(ge=1, le=600, strict=False)] = Field(
        10.0,
        alias="transactional.zookeeper.session.timeout.secs",
        description="Seconds after which a leader that is not heard of loses the lead.",
    )
    zookeeper_connection_timeout_secs: Annotated[float, Field(gt=0, le=600, strict=False)] = Field(
        15.0,
        alias="transactional.zookeeper.connection.timeout.secs",
        description="Seconds in which a server must answer at the start.",
    )
    zookeeper_election_timeout_secs: Annotated[float, Field(gt=0, le=600, strict=False)] = Field(
        15.0,
        alias="transactional.zookeeper.election.timeout.secs",
        description="Seconds that a command such as reset waits for the lead.",
    )
    zookeeper_auth: SecretStr | None = Field(
        None,
        alias="transactional.zookeeper.auth",
        description="digest:user:password for ACLs. Secret: give it as ${NAME} from the environment.",
    )
    zookeeper_tls_enabled: bool = Field(
        False,
        alias="transactional.zookeeper.tls.enabled",
        description="Whether connections to ZooKeeper are encrypted.",
    )
    zookeeper_tls_ca: str | None = Field(
        None,
        alias="transactional.zookeeper.tls.ca",
        description="A PEM file with the authorities that sign the servers' certificates.",
    )
    zookeeper_tls_certificate: str | None = Field(
        None, alias="transactional.zookeeper.tls.certificate", description="A PEM file with this client's certificate."
    )
    zookeeper_tls_key: str | None = Field(
        None, alias="transactional.zookeeper.tls.key", description="A PEM file with the key of that certificate."
    )
    zookeeper_tls_password: SecretStr | None = Field(
        None, alias="transactional.zookeeper.tls.password", description="The password of that key. Secret."
    )
    zookeeper_sasl_username: str | None = Field(
        None, alias="transactional.zookeeper.sasl.username", description="The user of SASL with DIGEST-MD5."
    )
    zookeeper_sasl_password: SecretStr | None = Field(
        None, alias="transactional.zookeeper.sasl.password", description="The password of that user. Secret."
    )
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, alias="metrics.prometheus.port", description="The port where metrics are served. Not set: nowhere."
    )
    metrics_host: str = Field(
        "127.0.0.1", alias="metrics.prometheus.host", description="The address where metrics are served."
    )
    metrics_allowed_hosts: tuple[str, ...] = Field(
        (),
        alias="metrics.prometheus.allowed.hosts",
        description="More names by which metrics may be asked for, such as that of a service.",
    )
    tracing_endpoint: str | None = Field(
        None,
        alias="tracing.otlp.endpoint",
        description="Where traces of transactions are sent by OTLP over HTTP, such as http://collector:4318/v1/traces. "
        "Not set: nowhere. Needs the extra otel.",
    )
    tracing_ratio: Annotated[float, Field(ge=0, le=1, strict=False)] = Field(
        1.0, alias="tracing.otlp.ratio", description="The share of transactions that are traced, from 0 to 1."
    )
    ui_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, alias="ui.port", description="The port where a run serves its page. Not set: nowhere."
    )
    ui_host: str = Field(
        "127.0.0.1",
        alias="ui.host",
        description="The address where the page is served. Any but a loopback address needs ui.token or ui.tls.client.ca.",
    )
    ui_token: SecretStr | None = Field(
        None,
        alias="ui.token",
        description="What a viewer of the page must show, 16 characters or more. Secret: give it as ${NAME} from the environment.",
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
        description="A PEM file with the authorities that sign the certificates of viewers, who need one then.",
    )
    spark: Mapping[str, str] = Field(default_factory=dict)
    kafka: Mapping[str, Any] = Field(default_factory=dict)
    app: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("zookeeper_servers", "ui_allowed_hosts", "metrics_allowed_hosts", mode="before")
    @classmethod
    def _servers(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("zookeeper_servers")
    @classmethod
    def _zookeeper_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            zookeeper_address(",".join(value))
        return value

    @field_validator("zookeeper_root")
    @classmethod
    def _root(cls, value: str) -> str:
        return checked_zookeeper_root(value)

    @field_validator("zookeeper_auth")
    @classmethod
    def _auth(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value is not None else "digest::"
        if text.count(":") < 2 or not text.startswith("digest:"):
            raise ValueError("must be digest:user:password; SASL has transactional.zookeeper.sasl.* and TLS .tls.*")
        return value

    @field_validator("ui_token")
    @classmethod
    def _token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < TOKEN_MIN:
            raise ValueError(f"must have at least {TOKEN_MIN} characters")
        return value

    @field_validator("state_provider_config", mode="before")
    @classmethod
    def _provider_config(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"is not JSON: {error}") from None
        return _wrapped(value)

    @classmethod
    def of(cls, values: Mapping[str, Any] | Config) -> Config:
        """Check a flat mapping of dotted keys. Raises ``ConfigError`` for the first key that is
        unknown or must not be set, otherwise one that names every value that does not fit."""
        if isinstance(values, Config):
            return values
        values = _gathered(values)
        spark = {key: _spark_value(key, value) for key, value in values.items() if key.startswith("spark.")}
        app = {key: value for key, value in values.items() if key.startswith("app.")}
        kafka = {
            key: SecretStr(str(value)) if is_secret(key) and not isinstance(value, SecretStr) else value
            for key, value in values.items()
            if key.startswith(KAFKA_PREFIX)
        }
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
                + ("" if _hides(str(each["loc"])) else f", not {each['input']!r}")
                for each in error.errors(include_url=False)
            ]
            raise ConfigError("; ".join(problems)) from None

    @classmethod
    def load(cls, path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
        """Read a TOML file, whose nested tables become dotted keys, and ``KEY=VALUE`` overrides,
        whose values are TOML or plain text. Raises ``ConfigError``.

        ``${NAME}`` in a value stands for an environment variable. An environment variable such as
        ``RATCHET_KAFKA_SASL_PASSWORD`` sets a ``kafka.*`` key, here ``kafka.sasl.password``. Use
        both for secrets, which belong neither in files nor in command lines. The file wins over
        such variables; overrides win over the file.
        """
        values: dict[str, Any] = {
            KAFKA_PREFIX + name.removeprefix(KAFKA_ENVIRONMENT).lower().replace("_", "."): value
            for name, value in os.environ.items()
            if name.startswith(KAFKA_ENVIRONMENT)
        }
        if path is not None:
            try:
                values.update(
                    flatten(tomllib.loads(local_path(path, "configuration file").read_text(encoding="utf-8-sig")))
                )
            except FileNotFoundError:
                raise ConfigError(f"{path}: no such configuration file") from None
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise ConfigError(f"{path}: {error}") from None
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key:
                raise ConfigError(f"--set {override!r}: write KEY=VALUE")
            values[key.strip()] = _toml_value(text.strip())
        return cls.of({key: resolved(key, value) for key, value in values.items()})

    @property
    def max_spout_pending(self) -> int:
        """The number of transactions that are processed at once; 1 by default."""
        return 1 if self.spout_pending is None else self.spout_pending

    def check_transactional(self) -> None:
        """Raise ``ConfigError`` for so many transactions at once that only tuples can have been
        meant."""
        if self.max_spout_pending > TRANSACTIONS_PENDING_MAX:
            raise ConfigError(
                f"topology.max.spout.pending is {self.max_spout_pending}: of a transactional topology it counts whole "
                f"transactions, and {TRANSACTIONS_PENDING_MAX} is the most"
            )

    @property
    def max_tuples_pending(self) -> int:
        """The number of tuples of each spout task of a core topology that may be pending at
        once."""
        return TUPLES_PENDING if self.spout_pending is None else self.spout_pending

    def zookeeper_hosts(self) -> str | None:
        """``host:port,...`` with the chroot at the end, or None when no servers are configured. A
        server may carry a port of its own."""
        if not self.zookeeper_servers:
            return None
        return str(zookeeper_address(",".join(self.zookeeper_servers), self.zookeeper_port))

    @property
    def ui_address(self) -> str | None:
        """Where browsers find the page of a run; None where none is served."""
        if self.ui_port is None:
            return None
        host = socket.gethostname() if self.ui_host in ("0.0.0.0", "::") else self.ui_host
        scheme = "http" if self.ui_tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.ui_port}/"

    def shown(self) -> list[tuple[str, str, bool]]:
        """Key, value and whether it was set, of every key of Ratchet and every other that was set,
        for people to read. What may be a secret is hidden: also each text of ``app.*``, which is
        the user's own and may hold anything."""
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
    return [(name, each.alias) for name, each in fields if each.alias and not _hides(each.alias)]


def _gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the keys below ``topology.state.provider.config``, which belong to the provider, into
    one table."""
    gathered = {key: value for key, value in values.items() if not key.startswith(f"{_PROVIDER_CONFIG}.")}
    for key, value in values.items():
        if key not in gathered:
            table = gathered.setdefault(_PROVIDER_CONFIG, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{_PROVIDER_CONFIG} is given as text, and {key} too: give one of them")
            *path, last = key.removeprefix(f"{_PROVIDER_CONFIG}.").split(".")
            for each in path:
                table = table.setdefault(each, {})
            table[last] = value
    return gathered


def _wrapped(value: Any, key: str = "") -> Any:
    """Return a table with its secrets wrapped."""
    if isinstance(value, Mapping):
        return {each: _wrapped(item, each) for each, item in value.items()}
    return SecretStr(value) if isinstance(value, str) and is_secret(key) else value


def is_secret(key: str) -> bool:
    """Whether a setting of this name may hold a secret, and is never shown.

    >>> is_secret("kafka.sasl.password"), is_secret("kafka.sasl.username")
    (True, False)
    """
    return any(fragment in key for fragment in _SECRET_FRAGMENTS)


def _hides(key: str) -> bool:
    """Whether one of Ratchet's own keys, including those for ZooKeeper, holds a secret."""
    return "zookeeper.auth" in key or "history.table" in key or is_secret(key)


def shown_value(key: str, value: Any) -> str:
    """A value of a setting as people may see it: hidden where it may be a secret."""
    if value is None or value in ((), {}):
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and not is_secret(key):
        return f"{value:g}" if isinstance(value, float) else str(value)
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    opaque = key.startswith("app.") or isinstance(value, (SecretStr, Mapping))
    if opaque or _hides(key) or _CREDENTIALS.search(text) or _SPARK_SECRET.search(key):
        return HIDDEN
    return text


def revealed(value: Any) -> Any:
    """A setting in plain text, as a client needs it."""
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def resolved(key: str, value: Any) -> Any:
    """Replace each ``${NAME}`` in a value by that environment variable. ``key`` names the value in
    messages. Raises ``ConfigError`` for a variable that is not set."""

    def look_up(match: re.Match[str]) -> str:
        found = os.environ.get(match.group(1))
        if found is None:
            raise ConfigError(
                f"{key} refers to ${{{match.group(1)}}}, and there is no such environment variable: set it"
            )
        return found

    if isinstance(value, str):
        return _REFERENCE.sub(look_up, value)
    return [resolved(key, each) for each in value] if isinstance(value, list) else value


def resolved_address(what: str, value: str, ends: str) -> str:
    """``resolved``, for an address, unless a sign in its password ends the password too early: then
    a part of the password would be taken for a host, a port or a path, and shown as that. ``what``
    names it in messages; ``ends``: the signs that end a password. Raises ``ConfigError``.

    >>> resolved_address("the address", "redis://:a%2Fb@host:6379/0", "/?#")
    'redis://:a%2Fb@host:6379/0'
    >>> resolved_address("the address", "redis://:a/b@host:6379/0", "/?#")
    Traceback (most recent call last):
    ...
    framework.errors.ConfigError: the address does not parse: is there a sign in its password that must be written in another \
way? Write %2F for /, %3F for ?, %23 for #, %40 for @, %3A for :
    """  # noqa: W505 - doctest lines are not wrapped
    address: str = resolved(what, value)
    scheme, found, rest = address.partition("://")
    authority = re.split(f"[{re.escape(ends)}]", rest, maxsplit=1)[0]
    path = rest[len(authority) :].partition("?")[0]
    hosts = authority.rpartition("@")[2].partition("?")[0].split(",")
    if found and (("@" in path and scheme != "unix") or not all(map(_HOST.fullmatch, hosts))):
        raise ConfigError(
            f"{what} does not parse: is there a sign in its password that must be written in another way? Write %2F for /, %3F "
            "for ?, %23 for #, %40 for @, %3A for :"
        )
    return address


def without_password(address: str) -> str:
    """An address, or several after commas, for messages.

    >>> without_password("http://me:secret@one:8081,http://two:8081")
    'http://***@one:8081,http://two:8081'
    """
    return _USER.sub("://***@", address)


def checked_zookeeper_root(value: str) -> str:
    """Return the path without empty components. Raises ``ValueError`` for a path that is empty, not
    absolute, or has a component that could leave the root.

    >>> checked_zookeeper_root("/a//b/")
    '/a/b'
    """
    parts = [part for part in value.split("/") if part]
    if not value.startswith("/") or not parts or not all(map(_is_node_name, parts)):
        raise ValueError("must be an absolute path such as /ratchet")
    return "/" + "/".join(parts)


class ZooKeeperAddress(NamedTuple):
    """``servers``: each ``host:port``. ``chroot``: the path below which all nodes are kept; empty
    where there is none."""

    servers: tuple[str, ...]
    chroot: str

    def __str__(self) -> str:
        return ",".join(self.servers) + self.chroot


def zookeeper_address(text: str, port: int = 2_181) -> ZooKeeperAddress:
    """Parse ``host:port,host:port/chroot``. Servers without a port get ``port``. Raises
    ``ValueError``, which says what is wrong, for everything else: ZooKeeper's own clients take
    parts of it for something else, such as the scheme of a URL for a host.

    >>> str(zookeeper_address("zk1, zk2:2182/team"))
    'zk1:2181,zk2:2182/team'
    """
    *servers, last = (each.strip() for each in text.split(","))
    last, slash, chroot = last.partition("/")
    if "://" in text:
        raise _no_address("a URL is not the address of a ZooKeeper server")
    found = []
    for each in (*servers, last):
        if not each:
            raise _no_address("a server is missing")
        if "/" in each:
            raise _no_address(f"{each!r} has a chroot of its own, and one chroot holds for all servers")
        server = _ZOOKEEPER_SERVER.fullmatch(each)
        if server is None:
            raise _no_address(f"{each!r} is not a host with or without a port")
        number = int(server["port"] or port)
        if not 1 <= number <= 65_535:
            raise _no_address(f"{each!r} has no port from 1 to 65535")
        found.append(f"{server['host']}:{number}")
    if slash and (" " in chroot or not all(map(_is_node_name, chroot.split("/")))):
        raise _no_address(f"the chroot {slash + chroot!r} is not a path such as /team")
    return ZooKeeperAddress(tuple(found), slash + chroot)


def _no_address(reason: str) -> ValueError:
    return ValueError(f"{reason}: write host:port,host:port, and after the last one a chroot such as /team, if any")


def _is_node_name(text: str) -> bool:
    """Whether ZooKeeper takes a text as the name of a node, and a person can see all of it."""
    return text not in ("", ".", "..") and text.isprintable()


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested TOML tables as dotted keys.

    >>> flatten({"topology": {"max.spout.pending": 4}})
    {'topology.max.spout.pending': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        found = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        for each in found.keys() & flat.keys():
            raise ConfigError(f"{each} is given twice, as a dotted key and in a table: leave one of them out")
        flat.update(found)
    return flat


def _spark_value(key: str, value: Any) -> str:
    if key in _SPARK_FIXED:
        raise ConfigError(f"{key} cannot be set: {_SPARK_FIXED[key]}")
    if key == "spark.master" and isinstance(value, str) and value.startswith("local[") and "," in value:
        raise ConfigError(f"spark.master {value!r}: local[N,F] repeats failed tasks; use {value.split(',')[0]}]")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _suggestion(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return (
        f"did you mean {near[0]!r}?"
        if near
        else f"the known keys are {', '.join(sorted(known))}, spark.*, kafka.* and app.*"
    )


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
