"""Questions to a Schema Registry, bounded in time and size.

Four outcomes besides an answer. ``NotFoundError``: the registry itself says that it does not have
a schema, a subject or a version. ``RefusedSchemaError``: it does not take a schema.
``RetryableError``: it does not answer now. ``NotARegistryError``: what answered is not a registry,
or does not behave as one; this is a fault of the address or of the server, never of a record.

Source: Confluent Schema Registry, API reference: error codes. The client is confluent-kafka's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary, finalize

from framework.clients.client_cache import ClientCache
from framework.config import HIDDEN, check_address, is_secret, passwords_in, resolved, shown_host
from framework.errors import ConfigError, RatchetError, RetryableError
from spouts.codecs.schema_cache import KEPT_BYTES_MAX

#: An answer is at most this large. The registry keeps a schema in one record, by default of 1 MB.
ANSWER_BYTES_MAX = 1 << 24
#: A question with its repetitions takes at most this long, also if the answer comes byte by byte.
ANSWER_TIMEOUT_S = 30.0
#: Unless the settings say otherwise, the time to wait for the next bytes.
_BYTES_TIMEOUT_S = 10.0
#: The registry's codes: subject, version, schema not found.
_NOT_FOUND = {40401, 40402, 40403}
#: What is shown of a message; the reason for which a schema is refused names fields and versions.
_MESSAGE_CHARACTERS_MAX, _REFUSAL_CHARACTERS_MAX = 200, 600
_UNKNOWN_CODE = -1
#: Shorter secrets are not replaced in messages.
_SECRET_CHARACTERS_MIN = 4
#: The clients of this process, by their settings, and the characters of schemas that each has
#: received since its cache was last emptied, because it would cache every schema.
_clients: ClientCache[Any] = ClientCache()
_cached: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class NotFoundError(ValueError):
    """The registry does not have what was asked for."""


class NotARegistryError(ConfigError):
    """What answers at the address does not answer as a Schema Registry does."""


class RefusedSchemaError(ConfigError):
    """The registry does not take a schema: it is not valid, or not compatible with an earlier
    one."""


class Registered(NamedTuple):
    """A version of a subject. ``version``: 0 where the registry does not say it."""

    schema_id: int
    version: int
    schema: Any


def new_schema(text: str, kind: str, references: Sequence[tuple[str, str, int]] = ()) -> Any:
    """A schema to ask for or to register. ``references``: name, subject and version of each schema
    that it refers to."""
    from confluent_kafka.schema_registry import Schema, SchemaReference

    return Schema(text, kind, [SchemaReference(*each) for each in references])


def check_urls(what: str, setting: str) -> None:
    """Raise ``ConfigError`` if an address in the setting, which separates addresses by commas, is
    not that of a Schema Registry. The message does not show the address."""
    for each in setting.split(","):
        _check(what, each.strip(), "https?|mock")


def _check(what: str, address: str, schemes: str) -> None:
    check_address(what, address, "/?#")
    user = address.rpartition("@")[0]
    if not re.match(f"({schemes})://", address) or re.search(r"[?#\s]", address) or not user.isascii():
        raise ConfigError(
            f"{what} does not parse: it begins with http:// or https:// and has no query; in a user and a password, write %2C "
            "for a comma, %20 for a space, and the bytes of other letters in the same way"
        )


def _shown(address: str) -> str:
    """Scheme, host and port of an address, for messages."""
    scheme, _, rest = address.strip().partition("://")
    server = re.split("[/?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    port = re.search(r":\d*$|$", server)
    return f"{scheme}://{shown_host(server[: port.start()])}{port.group()}" if port else f"{scheme}://{HIDDEN}"


def _secrets(settings: Mapping[str, Any]) -> list[str]:
    """The secrets in the settings, in each form in which a message could contain them; the longest
    first. Secrets of three characters or fewer could not be distinguished from other text."""
    found = {str(value) for name, value in settings.items() if is_secret(name)}
    found |= {each.partition(":")[2] for name, each in settings.items() if name.endswith("user.info")}
    for name in ("url", "proxy"):
        found |= set(passwords_in(str(settings.get(name, ""))))
    found |= {form(each) for each in found for form in (unquote, quote, lambda text: repr(text)[1:-1])}
    return sorted((each for each in found if len(each) >= _SECRET_CHARACTERS_MIN), key=len, reverse=True)


class RegistryClient:
    """Asks the Schema Registry that ``settings`` name. Clients with the same settings share one
    connection pool. ``${NAME}`` in a setting stands for an environment variable of the process that
    asks. ``form``: the form in which the registry gives schemas, for kinds with several forms;
    None: text. The cache of a client ignores forms, so each form has its own client."""

    def __init__(self, settings: Mapping[str, Any], form: str | None = None) -> None:
        self._settings = {name: resolved(f"{name!r} of the Schema Registry", value) for name, value in settings.items()}
        self._form = form
        if not self._settings.get("url"):
            raise ConfigError("a Schema Registry needs a url")
        url, proxy = str(self._settings["url"]), self._settings.get("proxy")
        check_urls("the url of the Schema Registry", url)
        if proxy is not None:
            _check("the proxy of the Schema Registry", str(proxy), "https?|socks5h?")
        self.where = ",".join(map(_shown, url.split(",")))
        self._secrets = _secrets(self._settings)
        self.key = repr([form, *sorted(self._settings.items(), key=lambda each: each[0])])

    def schema(self, schema_id: int) -> Any:
        """A schema by its id."""
        return self._schema(lambda client: client.get_schema(schema_id, fmt=self._form), f"schema id {schema_id}")

    def subjects(self, schema_id: int) -> list[str]:
        """The subjects that have a schema or had it."""
        what = f"the subjects of schema id {schema_id}"
        found = self._asked(lambda client: client.get_subjects_by_schema_id(schema_id, deleted=True), what)
        if not isinstance(found, list):
            raise NotARegistryError(self._is_no_registry(what, "the answer is not a list"))
        return [str(each) for each in found]

    def latest(self, subject: str) -> Registered:
        """The latest version of a subject."""
        versions: list[Any] = []

        def question(client: Any) -> Any:
            versions.append(client.get_latest_version(subject, fmt=self._form))
            return versions[-1].schema

        schema = self._schema(question, f"subject {subject!r}")
        return self._registered(versions[-1], schema, f"subject {subject!r}")

    def version(self, subject: str, version: int) -> Any:
        """One version of a subject."""
        what = f"{subject!r} version {version}"
        return self._schema(lambda client: client.get_version(subject, version, fmt=self._form).schema, what)

    def find(self, subject: str, schema: Any, *, normalize: bool) -> Registered:
        """The version of a subject that has this schema. Raises ``NotFoundError``."""
        what = f"this schema under subject {subject!r}"
        found = self._asked(lambda client: client.lookup_schema(subject, schema, normalize_schemas=normalize), what)
        return self._registered(found, schema, what)

    def register(self, subject: str, schema: Any, *, normalize: bool) -> Registered:
        """Add a schema to a subject, unless it has it. Raises ``RefusedSchemaError``."""
        what = f"a new schema for subject {subject!r}"
        found = self._asked(
            lambda client: client.register_schema_full_response(subject, schema, normalize_schemas=normalize), what
        )
        return self._registered(found, schema, what)

    def incompatibility(self, subject: str, schema: Any, *, normalize: bool) -> str | None:
        """The reason for which the subject would refuse a schema; None if it would take it, or if
        there is no such subject. Changes nothing."""
        what = f"the compatibility of a schema with subject {subject!r}"
        path = (
            f"compatibility/subjects/{quote(subject, safe='')}/versions?normalize={str(normalize).lower()}&verbose=true"
        )
        try:
            found = self._asked(lambda client: client._rest_client.post(path, body=schema.to_dict()), what)
        except NotFoundError:
            return None
        except RefusedSchemaError as error:
            return str(error)
        if not isinstance(found, dict) or not isinstance(found.get("is_compatible"), bool):
            raise NotARegistryError(self._is_no_registry(what, "the answer is not a verdict"))
        if found["is_compatible"]:
            return None
        messages = found.get("messages") or [found.get("reason") or "it gives no reason"]
        return self._refused(f"a new schema for subject {subject!r}", "; ".join(map(str, messages)))

    def _registered(self, found: Any, schema: Any, what: str) -> Registered:
        if not isinstance(found.schema_id, int):
            self._client().clear_caches()
            raise NotARegistryError(self._is_no_registry(what, "the answer has no id"))
        return Registered(found.schema_id, found.version if isinstance(found.version, int) else 0, schema)

    def _schema(self, question: Callable[[Any], Any], what: str) -> Any:
        """A schema that was asked for. The client does not look at what it is made of."""
        found = self._asked(question, what)
        texts = [found.schema_str, found.schema_type or "AVRO"]
        references = found.references or []
        if isinstance(references, list):
            texts += [text for each in references for text in (each.name, each.subject)]
        if not isinstance(references, list) or not all(isinstance(each, str) for each in texts):
            self._client().clear_caches()
            raise NotARegistryError(self._is_no_registry(what, "the answer is not a schema"))
        client = self._client()
        _cached[client] = _cached.get(client, 0) + len(found.schema_str)
        if _cached[client] > KEPT_BYTES_MAX:
            client.clear_caches()
            _cached[client] = 0
        return found

    def _asked(self, question: Callable[[Any], Any], what: str) -> Any:
        """The answer to a question. The thread that asks is left alone if it takes too long: its
        connection is closed, and so it ends."""
        client = self._client()
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def ask() -> None:
            try:
                outcome.append(question(client))
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                failure.append(error)

        thread = threading.Thread(target=ask, name="schema-registry", daemon=True)
        thread.start()
        thread.join(ANSWER_TIMEOUT_S)
        if thread.is_alive():
            _clients.forget(self.key)
            client._rest_client.session.close()
            raise RetryableError(
                f"the Schema Registry at {self.where}, {what}: no whole answer in {ANSWER_TIMEOUT_S:g} s"
            )
        if failure:
            raise self._error(failure[0], what) from None
        return outcome[0]

    def _error(self, error: BaseException, what: str) -> BaseException:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        if isinstance(error, (RatchetError, KeyboardInterrupt, SystemExit)):
            return error
        if isinstance(error, SchemaRegistryError):
            status = error.http_status_code
            if status == 404 and error.error_code in _NOT_FOUND:
                return NotFoundError(f"the Schema Registry does not know {what}")
            if status in (401, 403):
                return ConfigError(
                    f"the Schema Registry at {self.where} refuses {what} ({status}): check its credentials"
                )
            if status in (409, 422) and error.error_code != _UNKNOWN_CODE:
                return RefusedSchemaError(self._refused(what, str(error.error_message)))
            said = f"status {status}, {self._without_secrets(error.error_message)[:_MESSAGE_CHARACTERS_MAX]!r}"
            if status == 429 or status >= 500:
                return RetryableError(f"the Schema Registry at {self.where}, {what}: {said}")
            return NotARegistryError(self._is_no_registry(what, said))
        if isinstance(error, OSError) or type(error).__module__.split(".")[0].startswith("httpx"):
            return RetryableError(
                f"the Schema Registry at {self.where} does not answer: {self._without_secrets(error)}"
            )
        reason = f"{type(error).__name__}: {self._without_secrets(error)[:_MESSAGE_CHARACTERS_MAX]!r}"
        return NotARegistryError(self._is_no_registry(what, reason))

    def _without_secrets(self, said: object) -> str:
        """A text of the client or of a server, without the secrets of the settings."""
        text = str(said)
        for each in self._secrets:
            text = text.replace(each, HIDDEN)
        return text

    def _refused(self, what: str, reason: str) -> str:
        reason = " ".join(self._without_secrets(reason).split())[:_REFUSAL_CHARACTERS_MAX]
        return (
            f"the Schema Registry at {self.where} refuses {what}: {reason}; change the schema so that it is compatible (a new "
            "field needs a default), or write under another subject"
        )

    def _is_no_registry(self, what: str, reason: str) -> str:
        return f"{self.where} does not answer as a Schema Registry, {what}: {reason}; check the address"

    def _client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigError(
                f"the Schema Registry's client lacks {error.name}: pip install 'ratchet-pipelines[registry]'"
            ) from error

        def make() -> Any:
            try:
                client = SchemaRegistryClient({"timeout": _BYTES_TIMEOUT_S, **self._settings})
            except (ValueError, TypeError, KeyError, OSError) as error:
                raise ConfigError(f"Schema Registry settings: {self._without_secrets(error)}") from None
            _bound(client)
            finalize(client, client._rest_client.session.close)
            return client

        return _clients.get(self.key, make)


def _bound(client: Any) -> None:
    """Bound the answers that a client reads, before it reads them. They come uncompressed: a small
    answer could become a large one."""
    session = client._rest_client.session
    session.headers["Accept-Encoding"] = "identity"
    session.event_hooks = {"response": [_bound_answer]}


def _bound_answer(response: Any) -> None:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        response.close()
        raise ValueError(f"a compressed answer ({encoding[:20]!r}), although none was asked for")
    response.stream = _bounded_stream()(response.stream)


def _bounded_stream() -> Any:
    import httpx2  # an optional extra

    class BoundedStream(httpx2.SyncByteStream):
        """The bytes of another stream, up to a bound."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in self._stream:
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX:,} bytes")
                yield part

        def close(self) -> None:
            self._stream.close()

    return BoundedStream
