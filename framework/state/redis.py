"""State in Redis.

::

    ratchet:{namespace}              hash: key -> committed value
    ratchet:{namespace}:meta         txid: the last checkpoint; ready:<txid>: how many parts it has,
                                     how many changes all parts but the last one have, and how many
                                     the checkpoint has; count: how many keys are committed
    ratchet:{namespace}:prepared     set of the ids under which something is prepared
    ratchet:{namespace}:<txid>:<n>   hash: part n of the prepared changes: "+" and a value, or "-"
                                     for a deletion

Changes are sent in pipelines. A script applies prepared changes inside Redis, part by part. It does
nothing once this checkpoint, or a higher one, is committed. A small checkpoint is one step. Scans
use ``HSCAN``, so that no step blocks the server.

Each script that reads or writes values first compares their number with ``count``. Otherwise keys
that another program has removed, or that Redis has expired or evicted, would silently restart from
empty values (ADR 79).

Source: ``org.apache.storm.redis.state.RedisKeyValueStateProvider``.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from framework.clients.redis_errors import VALUE_BYTES_MAX, evicts, leave_replica, passes, redirects, server_information
from framework.errors import ConfigError, CorruptStateError, RetryableError, TopologyError
from framework.observe.logs import get_logger
from framework.state.checkpointed_key_value_state import Changes, LayeredState
from framework.state.corrupt_entries import shown
from framework.state.provider_settings import RedisSettings, settings_of
from framework.state.serialization import Serializer
from framework.topology.context import TopologyContext
from framework.topology.stateful import KeyValueState, StateProvider

try:
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry
except ImportError as error:  # redis is an optional extra
    raise ConfigError(
        "RedisKeyValueStateProvider needs the package redis: pip install 'ratchet-pipelines[redis]'"
    ) from error

T = TypeVar("T")
_log = get_logger()

#: Changes per part. Redis applies a part in one step, during which it serves no other client.
PART_CHANGES = 5_000
SCAN_COUNT = 2_000
#: How many read entries a task caches. The cache is safe because only this task writes them.
CACHED_MAX = 250_000
_RETRIES = 6
#: A scan remembers the digest of a longer key. A digest has more bytes than this, so no short key
#: equals one.
_SHORT_BYTES = 32
#: The answer of a script when keys are missing: the expected number and the actual number.
_LOST = re.compile(r"LOST (.*) (\d+)")
#: The answer of a script to a value that is too long: its bytes, and the beginning of its key.
_LONG = re.compile(r"LONG (\d+) (.*)", re.DOTALL)
#: A number written by this module.
_NUMBER = re.compile(r"\d{1,18}")
#: Upper bounds for damaged data: no run prepares more checkpoints at a time, and no server holds
#: more parts.
_PREPARED_MAX, _PARTS_MAX = 1_000, 100_000

# The prologue of scripts whose first keys are the meta data and the values.
_COUNTED = """
local function check()
  local expected, held = redis.call('HGET', KEYS[1], 'count') or '0', tostring(redis.call('HLEN', KEYS[2]))
  return expected ~= held and redis.error_reply('LOST ' .. string.sub(expected, 1, 20) .. ' ' .. held)
end
local function write(puts, deleted)
  for i = 1, #puts, 4000 do redis.call('HSET', KEYS[2], unpack(puts, i, math.min(i + 3999, #puts))) end
  for i = 1, #deleted, 4000 do redis.call('HDEL', KEYS[2], unpack(deleted, i, math.min(i + 3999, #deleted))) end
  redis.call('HSET', KEYS[1], 'count', redis.call('HLEN', KEYS[2]))
end
"""

# KEYS: meta, values, a part. ARGV: txid, 1 if this part is the last one, the number of its changes
# (-1 for a part prepared by an earlier version). Returns 1; 0 when the checkpoint is already
# committed or discarded; -1 when the part, or changes of it, are missing; -2 and the key for an
# invalid change.
_APPLY = f"""{_COUNTED}
local done = tonumber(redis.call('HGET', KEYS[1], 'txid') or '0')
if done >= tonumber(ARGV[1]) then return {{0}} end
if redis.call('HEXISTS', KEYS[1], 'ready:' .. ARGV[1]) == 0 then return {{0}} end
local lost = check()
if lost then return lost end
local all, wanted = redis.call('HGETALL', KEYS[3]), tonumber(ARGV[3])
if (wanted >= 0 and #all ~= 2 * wanted) or (wanted < 0 and #all == 0) then return {{-1}} end
local puts, deleted = {{}}, {{}}
for i = 1, #all, 2 do
  local sign = string.sub(all[i + 1], 1, 1)
  if sign == '+' then
    puts[#puts + 1] = all[i]
    puts[#puts + 1] = string.sub(all[i + 1], 2)
  elseif all[i + 1] == '-' then
    deleted[#deleted + 1] = all[i]
  else
    return {{-2, string.sub(all[i], 1, 60)}}
  end
end
write(puts, deleted)
if ARGV[2] == '1' then redis.call('HSET', KEYS[1], 'txid', ARGV[1]) end
return {{1}}
"""

# KEYS: meta, values. ARGV: the number of arguments that are keys and values to put; these; then
# keys to delete. Returns 1.
_WRITE = f"""{_COUNTED}
local lost = check()
if lost then return lost end
local puts, deleted, last = {{}}, {{}}, 1 + tonumber(ARGV[1])
for i = 2, #ARGV do
  local into = i <= last and puts or deleted
  into[#into + 1] = ARGV[i]
end
write(puts, deleted)
return 1
"""

# KEYS: meta, values. ARGV: keys. Returns their values.
_GET = f"""{_COUNTED}
local lost = check()
if lost then return lost end
if #ARGV == 0 then return {{}} end
local found = redis.call('HMGET', KEYS[2], unpack(ARGV))
for i = 1, #found do
  if found[i] and #found[i] > {VALUE_BYTES_MAX} then
    return redis.error_reply('LONG ' .. #found[i] .. ' ' .. string.sub(ARGV[i], 1, 60))
  end
end
return found
"""


class RedisKeyValueStateProvider(StateProvider):
    """Set ``topology.state.provider.config.jedisPoolConfig``, with ``host``, ``port``, ``timeout``
    in milliseconds, ``database``, ``username``, ``password``, ``ssl``."""

    def __init__(self) -> None:
        self._clients: dict[str, redis.Redis] = {}

    def new_state(
        self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None
    ) -> KeyValueState[Any, Any]:
        settings = settings_of(conf, RedisSettings)
        return LayeredState(
            RedisStore(self._client(settings), namespace), settings.keys(), settings.values(), cached_max=CACHED_MAX
        )

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        settings = settings_of(conf, RedisSettings)
        settings.keys(), settings.values()
        pool = settings.jedisPoolConfig
        try:
            client = self._client(settings)
            client.ping()
            _refuse_losses(client, f"Redis at {pool.host}:{pool.port}")
        except redis.AuthenticationError as error:
            raise ConfigError(f"Redis at {pool.host}:{pool.port} lets this user not in: {error}") from None
        except redis.RedisError as error:
            raise ConfigError(
                f"Redis at {pool.host}:{pool.port} does not answer: {error}; see topology.state.provider.config.jedisPoolConfig"
            ) from None

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Serializer, Serializer]:
        settings = settings_of(conf, RedisSettings)
        return settings.keys(), settings.values()

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        return RedisStore(self._client(settings_of(conf, RedisSettings)), namespace).txid() > 0

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        RedisStore(self._client(settings_of(conf, RedisSettings)), namespace).drop()

    def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for each in clients:
            each.close()

    def _client(self, settings: RedisSettings) -> redis.Redis:
        pool = settings.jedisPoolConfig
        name = pool.model_dump_json()
        if name not in self._clients:
            self._clients[name] = redis.Redis(
                host=pool.host,
                port=pool.port,
                db=pool.database,
                username=pool.username,
                password=pool.password.get_secret_value() if pool.password is not None else None,
                ssl=pool.ssl,
                socket_timeout=pool.timeout / 1000,
                socket_connect_timeout=pool.timeout / 1000,
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.02), _RETRIES),
                retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
            )
        return self._clients[name]


def _refuse_losses(client: redis.Redis, where: str) -> None:
    """Raise ``ConfigError`` for a server that could lose state unnoticed. Log a warning for one
    that can lose state in a crash only: the checkpoint record reveals that loss."""
    found = server_information(client)
    if found is None:
        reason = "the user may not ask whether it is a replica or evicts keys; allow INFO if the service can"
        _log.warning("state.may_lose_writes", server=where, reason=reason)
        return
    if found.get("role", "master") != "master":
        raise ConfigError(f"{where} cannot keep state: it is a replica; give the address of the primary")
    if eviction := evicts(found):
        raise ConfigError(f"{where} could lose state: {eviction}")
    if not found.get("aof_enabled"):
        reason = "the server has no append-only file: after a crash of it the topology stops; set appendonly yes"
        _log.warning("state.may_lose_writes", server=where, reason=reason)


class RedisStore:
    """A ``CommittedStore``. Every command may be repeated."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client: Any = client  # the client's types also allow text and awaitables
        self._values = f"ratchet:{{{namespace}}}"
        self._meta = f"{self._values}:meta"
        self._pending = f"{self._values}:prepared"
        self._get, self._apply, self._write = (client.register_script(each) for each in (_GET, _APPLY, _WRITE))

    @property
    def location(self) -> str:
        return self._values

    def txid(self) -> int:
        with self._asking():
            return self._number("txid", self._client.hget(self._meta, "txid") or b"0")

    def _number(self, field: str, text: bytes) -> int:
        """Decode a number of the meta data."""
        try:
            found = text.decode("ascii")
            if _NUMBER.fullmatch(found):
                return int(found)
        except UnicodeDecodeError:
            pass
        raise self._damaged(self._meta, f"{field} is {shown(text)}, not a number")

    def _damaged(self, key: str, what: str) -> CorruptStateError:
        return CorruptStateError(
            f"{key} in Redis: {what}; another program has written it: restore the server's data, or a snapshot (ratchet state "
            "restore)"
        )

    def _prepared_in(self, txid: int) -> list[int] | None:
        """The number of changes in each part of a prepared checkpoint, -1 for a part of an earlier
        version; None when none is prepared."""
        field = f"ready:{txid}"
        found = self._client.hget(self._meta, field)
        if found is None:
            return None
        parts, *sizes = [self._number(field, each) for each in found.split(b" ", 3)]
        size, changes = sizes if len(sizes) == 2 else (0, 0)
        fits_together = not sizes or (size > 0 and parts == -(-changes // size))
        if parts > _PARTS_MAX or len(sizes) not in (0, 2) or not fits_together:
            raise self._damaged(self._meta, f"{field} is {shown(found)}, as of no checkpoint")
        return [min(size, changes - size * part) if sizes else -1 for part in range(parts)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._asking():
            for part in _batched(keys, PART_CHANGES):
                found += self._get([self._meta, self._values], part)
        return found

    def _check(self) -> None:
        """Raise ``CorruptStateError`` if keys are missing."""
        with self._asking():
            self._get([self._meta, self._values], [])

    def count(self) -> int:
        with self._asking():
            return int(self._client.hlen(self._values))

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        seen: set[bytes] = set()  # while its hash table shrinks, Redis may return a key twice
        with self._asking():
            for key, value in self._client.hscan_iter(self._values, count=SCAN_COUNT):
                if len(value) > VALUE_BYTES_MAX:
                    raise self._too_long(key, len(value))
                short = key if len(key) <= _SHORT_BYTES else b"d" + hashlib.sha256(key).digest()
                if short not in seen:
                    seen.add(short)
                    yield key, value

    def part(self, cursor: Any, most: int) -> tuple[list[tuple[bytes, bytes]], Any]:
        self._check()
        found: dict[bytes, bytes] = {}
        with self._asking():
            while len(found) < most:
                cursor, entries = self._client.hscan(self._values, cursor=cursor or 0, count=SCAN_COUNT)
                found.update(entries)
                if cursor == 0:
                    return list(found.items()), None
        return list(found.items()), cursor

    frozen = False

    def snapshot(self) -> tuple[int, Iterator[tuple[bytes, bytes]]]:
        return self.txid(), self.scan()

    def prepare(self, txid: int, changes: Changes) -> None:
        self.discard(txid)
        parts = 0
        with self._asking():
            self._client.sadd(self._pending, txid)
            for parts, part in enumerate(_batched(changes.items(), PART_CHANGES), 1):
                name = self._part(txid, parts - 1)
                mapping = {key: b"-" if value is None else b"+" + self._short(key, value) for key, value in part}
                with self._client.pipeline(transaction=True) as pipeline:
                    pipeline.delete(name)
                    pipeline.hset(name, mapping=mapping)
                    pipeline.execute()
            self._client.hset(self._meta, f"ready:{txid}", f"{parts} {PART_CHANGES} {len(changes)}")

    def commit(self, txid: int) -> None:
        with self._asking():
            if self.txid() >= txid:
                return
            ready = self._prepared_in(txid)
            if ready is None:
                if self.txid() >= txid:
                    return
                raise CorruptStateError(f"{self._values} has nothing prepared as checkpoint {txid}: was Redis emptied?")
            for part, wanted in enumerate(ready or [0]):
                last = "1" if part >= len(ready) - 1 else "0"
                name = self._part(txid, part)
                answer = self._apply([self._meta, self._values, name], [txid, last, wanted])
                if answer[0] == -1:
                    raise CorruptStateError(
                        f"{self._values} lacks changes that were prepared as checkpoint {txid}: who has removed them from {name} "
                        "in Redis? Restore the server's data, or a snapshot (ratchet state restore)"
                    )
                if answer[0] == -2:
                    raise self._damaged(name, f"the value of {answer[1]!r} is no change")
        self.discard(txid)

    def discard(self, upto: int | None) -> None:
        with self._asking():
            if self._client.scard(self._pending) > _PREPARED_MAX:
                raise self._damaged(self._pending, "it has too many members")
            for each in sorted(self._number(self._pending, each) for each in self._client.smembers(self._pending)):
                if upto is not None and each > upto:
                    continue
                parts = len(self._prepared_in(each) or ())
                self._client.hdel(self._meta, f"ready:{each}")
                # An incomplete checkpoint may have parts too: delete parts until the next one is
                # missing.
                for part in itertools.count():
                    if not self._client.unlink(self._part(each, part)) and part >= parts:
                        break
                self._client.srem(self._pending, each)

    def write(self, changes: Changes, txid: int | None) -> None:
        with self._asking():
            for part in _batched(changes.items(), PART_CHANGES):
                puts = [each for key, value in part if value is not None for each in (key, self._short(key, value))]
                deleted = [key for key, value in part if value is None]
                self._write([self._meta, self._values], [len(puts), *puts, *deleted])
            if txid is not None:
                self._client.hset(self._meta, "txid", txid)

    def _too_long(self, key: bytes, size: int) -> CorruptStateError:
        return self._damaged(
            self._values, f"the value of {shown(key)} has {size:,} bytes, more than {VALUE_BYTES_MAX:,}"
        )

    def _short(self, key: bytes, value: bytes) -> bytes:
        """The value. Raises ``TopologyError`` if it is too long to be read again."""
        if len(value) > VALUE_BYTES_MAX:
            raise TopologyError(
                f"{self._values}: the value of {shown(key)} has {len(value):,} bytes, more than {VALUE_BYTES_MAX:,}: keep "
                "less in one key"
            )
        return value

    def drop(self) -> None:
        self.discard(None)
        with self._asking():
            self._client.unlink(self._values, self._meta, self._pending)

    def close(self) -> None:
        """Nothing to close: the connections belong to the provider."""

    def _part(self, txid: int, part: int) -> str:
        return f"{self._values}:{txid}:{part}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except redis.ResponseError as error:
            if passes(error):
                leave_replica(self._client, error)
                raise RetryableError(f"{self._values}: {error}") from error
            if where := redirects(error):
                raise ConfigError(f"{self._values}: {where}") from error
            if long := _LONG.search(str(error)):
                raise self._too_long(long[2].encode(), int(long[1])) from error
            if lost := _LOST.search(str(error)):
                raise CorruptStateError(
                    f"{self._values} has {lost[2]} keys, and {lost[1]} were committed: another program has removed some (DEL, "
                    "HDEL), or they expired or were evicted, or some were added; restore the server's data, or a snapshot (ratchet "
                    "state restore)"
                ) from error
            if "WRONGTYPE" in str(error):
                raise self._wrong_type() from error
            raise CorruptStateError(f"{self._values}: {error}; does something else use these keys?") from error
        except redis.RedisError as error:
            raise RetryableError(f"{self._values}: Redis does not answer: {error}") from error

    def _wrong_type(self) -> CorruptStateError:
        """Make the error that names the key of a wrong type."""
        kinds = {self._values: b"hash", self._meta: b"hash", self._pending: b"set"}
        with suppress(redis.RedisError):
            for key, wanted in kinds.items():
                if (kind := self._client.type(key)) not in (wanted, b"none"):
                    return self._damaged(key, f"it is a {kind.decode()}, not a {wanted.decode()}")
        return self._damaged(f"{self._values}:*", "what is prepared is not in hashes")


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    waiting = iter(items)
    while batch := list(itertools.islice(waiting, size)):
        yield batch
