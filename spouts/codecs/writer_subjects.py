"""Under which subjects of a Schema Registry the schema of a sink's records is, and its id there.

The driver asks and registers, before the first batch. Tasks only ask, and only once per process,
because an id never changes.

Source: Confluent Schema Registry, subject name strategies; the serializers' settings
``auto.register.schemas`` and ``normalize.schemas``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from cachetools import LRUCache

from framework.errors import ConfigError, TopologyError
from spouts.codecs.registry_client import NotFoundError, RefusedSchemaError, Registered, RegistryClient

#: How a subject is called: ``<topic>-value``, ``<record>``, or ``<topic>-<record>``.
SubjectNameStrategy = Literal["topic", "record", "topic_record"]
#: A schema that the driver has registered is asked for again after these pauses: a node of the
#: registry that follows another one lags.
_PAUSES_S = (0.5, 2.5)
#: The ids that this process knows, by registry, subjects and schema.
_known: LRUCache[tuple[str, ...], int] = LRUCache(10_000)

Find = Callable[[str, Any], Registered]
#: Makes a schema as the client takes it. Calls the function for each schema that it refers to.
MakeSchema = Callable[[Find], Any]


class WriterSubjects:
    """The subjects of one schema.

    ``subject``: the only one; otherwise ``strategy`` makes them of the topics and of ``record``,
    the name of the schema. ``register``: whether the driver may add the schema to them.
    """

    def __init__(
        self,
        registry: RegistryClient,
        subject: str | None,
        strategy: SubjectNameStrategy,
        record: str | None,
        *,
        register: bool,
        normalize: bool,
    ) -> None:
        if strategy not in get_args(SubjectNameStrategy):
            known = ", ".join(map(repr, get_args(SubjectNameStrategy)))
            raise TopologyError(f"subject_name_strategy must be one of {known}, not {strategy!r}")
        self._registry = registry
        self._subject, self._strategy, self._record = subject, strategy, record
        self._may_register, self._normalize = register, normalize
        self._part, self._topics = "value", tuple[str, ...]()

    def for_topics(self, part: str, topics: Sequence[str]) -> WriterSubjects:
        """The same for the keys or the values of these topics; none: the rows name them. Raises
        ``TopologyError`` where a subject depends on a topic that is not known."""
        copied = copy.copy(self)
        copied._part, copied._topics = part, tuple(topics)
        copied.names()
        return copied

    def names(self) -> list[str]:
        """The subjects. Raises ``TopologyError``."""
        if self._subject is not None:
            return [self._subject]
        if self._strategy != "topic" and self._record is None:
            raise TopologyError(f"subject_name_strategy={self._strategy!r} needs a schema with a name: give subject=")
        if self._strategy == "record":
            return [str(self._record)]
        if not self._topics:
            raise TopologyError(
                f"subject_name_strategy={self._strategy!r} makes the subject of the topic, which is not known before there "
                "are rows: give subject=, subject_name_strategy='record', or KafkaSink(topics=[...])"
            )
        return [f"{each}-{self._part if self._strategy == 'topic' else self._record}" for each in self._topics]

    def check(self, make: MakeSchema) -> int | None:
        """The id of the schema; None if it is still to be registered. Changes nothing. Raises
        ``ConfigError`` if it may not be registered, or would be refused."""
        found: list[int] = []
        for subject in self.names():
            try:
                found.append(self._find(subject, make(self._find)).schema_id)
            except NotFoundError:
                self._check_new(subject, make)
        return self._same(found) if len(found) == len(self.names()) else None

    def register(self, make: MakeSchema) -> int:
        """The id of the schema, which is registered where it is missing, if it may be. Raises
        ``ConfigError``."""
        found = []
        for subject in self.names():
            try:
                found.append(self._find(subject, make(self._find)).schema_id)
            except NotFoundError:
                if not self._may_register:
                    raise self._missing(subject) from None
                found.append(self._added(subject, make(self._find_or_add)).schema_id)
        return self._same(found)

    def find(self, make: MakeSchema, schema_key: str) -> int:
        """The id of the schema, which is registered already. ``schema_key``: tells it from others.
        Raises ``ConfigError``."""
        key = (self._registry.key, str(self._normalize), schema_key, *self.names())
        if key not in _known:
            _known[key] = self._same([self._awaited(subject, make) for subject in self.names()])
        return _known[key]

    def _awaited(self, subject: str, make: MakeSchema) -> int:
        for pause in (*_PAUSES_S, 0.0):
            try:
                return self._find(subject, make(self._find)).schema_id
            except NotFoundError:
                time.sleep(pause)
        raise self._missing(subject)

    def _check_new(self, subject: str, make: MakeSchema) -> None:
        if not self._may_register:
            raise self._missing(subject)
        try:
            schema = make(self._find)
        except NotFoundError:
            return  # a schema that it refers to is new, so it is, too
        refused = self._registry.incompatibility(subject, schema, normalize=self._normalize)
        if refused is not None:
            raise RefusedSchemaError(refused)

    def _find_or_add(self, subject: str, schema: Any) -> Registered:
        try:
            return self._find(subject, schema)
        except NotFoundError:
            self._added(subject, schema)
            return self._find(subject, schema)  # which has the version

    def _find(self, subject: str, schema: Any) -> Registered:
        return self._registry.find(subject, schema, normalize=self._normalize)

    def _added(self, subject: str, schema: Any) -> Registered:
        return self._registry.register(subject, schema, normalize=self._normalize)

    def _missing(self, subject: str) -> ConfigError:
        return ConfigError(
            f"the Schema Registry at {self._registry.where} does not have the schema under subject {subject!r}: register it, "
            "or give register=True"
        )

    def _same(self, ids: Sequence[int]) -> int:
        if len(set(ids)) > 1:
            given = ", ".join(f"{each} under {name!r}" for name, each in zip(self.names(), ids, strict=True))
            raise ConfigError(
                f"the Schema Registry has several ids for the schema ({given}), and a sink writes one: give subject= or "
                "subject_name_strategy='record'"
            )
        return ids[0]
