"""The coordination store on ZooKeeper, through kazoo.

Invariants:

1. Every change of a leadership is one multi that also replaces the ``epoch`` node under the version
   that this leader last saw; see ``fenced``.
2. A new leader writes a greater epoch before it reads anything else (C3).

Layout below ``<root>/<path>``: ``leader/`` holds the election, ``epoch`` holds the fence.
Everything else belongs to the caller.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    LockTimeout,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionClosedRequireSaslError,
    SessionExpiredError,
)
from kazoo.protocol.serialization import Connect
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry

from framework.config import checked_zookeeper_root, zookeeper_address
from framework.coordination.fenced import FencedLeadership, FenceMoved, ReplyLost, fence_of
from framework.coordination.security import ZooKeeperSecurity
from framework.coordination.store import Change, CoordinationStore, Leadership, Put
from framework.coordination.transactional_state import encode_document
from framework.errors import ConfigError, CorruptStateError, RetryableError
from framework.observe.logs import get_logger

_log = get_logger()
_LOST_REPLY = (ConnectionLoss, SessionExpiredError, ConnectionClosedError, OperationTimeoutError)
_CONNECTED = (KeeperState.CONNECTED, KeeperState.CONNECTED_RO)
_POLL_S = 0.05
#: How often a client that has no connection asks the servers for the reason.
_LOOK_EVERY_S = 1.0
#: The largest request that a server accepts (the default of jute.maxbuffer), and the bytes that an
#: operation needs in addition to path and data.
_REQUEST_BYTES_MAX = 0xFFFFF
_OPERATION_BYTES = 100
#: A session without a connection is abandoned after this many session timeouts, but not before this
#: many seconds.
_GIVE_UP_SESSIONS = 3
_GIVE_UP_MIN_S = 10.0
NO_SECURITY = ZooKeeperSecurity()
T = TypeVar("T")


class ZooKeeperStore(CoordinationStore):
    """Documents below ``root`` on the ensemble at ``hosts`` (``host:port,host:port``, optionally
    followed by a chroot, below which the root is).

    ``session_timeout_s`` bounds how long a dead leader blocks the election. The servers may raise
    or lower it to their own limits. ``observes``: only read, and do not even create the root.
    Raises ``ConfigError`` for hosts that are not an address, for a root that is not a path, and
    when a TLS handshake shows why the servers refuse this client. Raises ``RetryableError`` when no
    server answers within ``connect_timeout_s``.
    """

    def __init__(
        self,
        hosts: str,
        root: str = "/ratchet",
        *,
        session_timeout_s: float = 10.0,
        connect_timeout_s: float = 15.0,
        security: ZooKeeperSecurity = NO_SECURITY,
        observes: bool = False,
    ) -> None:
        self._hosts = hosts
        try:
            address = zookeeper_address(hosts)
        except ValueError as error:
            raise ConfigError(f"transactional.zookeeper.servers: {error}, not {hosts!r}") from None
        try:
            self._root = address.chroot + checked_zookeeper_root(root)
        except ValueError as error:
            raise ConfigError(f"transactional.zookeeper.root {error}, not {root!r}") from None
        self._known: dict[str, set[str]] = {}
        self._lock = threading.RLock()
        #: The folder, and the beginning of the name, of nodes of candidates that gave up. While the
        #: session lasts, such a node lets nobody lead.
        self._abandoned: set[tuple[str, str]] = set()
        self._client = KazooClient(
            hosts=",".join(address.servers),
            timeout=session_timeout_s,
            **security.client_options(),
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0),
            command_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0, max_jitter=0.1),
        )
        self._lost_sessions = 0
        # because of credentials; kazoo itself soon reports only a closed connection
        self._refused = False
        self._give_up_after_s = max(_GIVE_UP_SESSIONS * session_timeout_s, _GIVE_UP_MIN_S)
        self._giving_up: threading.Timer | None = None
        granted_s = _note_granted_timeout(self._client)
        self._client.add_listener(self._on_state)
        self._ensured: set[str] = set()
        try:
            self._connect(connect_timeout_s, security)
            if observes:
                self.children("")
            else:
                self._ensure_parents(self._root + "/x")
        except BaseException:
            self.close()
            raise
        granted = granted_s()
        if granted is not None and abs(granted - session_timeout_s) > 0.01:
            _log.warning(
                "zookeeper.session_timeout",
                wanted_s=session_timeout_s,
                granted_s=granted,
                reason="the servers' minSessionTimeout and maxSessionTimeout bound it",
            )

    # --- CoordinationStore ------------------------------------------------------------------------

    def get(self, path: str) -> bytes | None:
        node = self._node(path)
        try:
            data: bytes = self._reading(lambda: self._client.get(node)[0], node)
        except NoNodeError:
            return None
        return data

    def children(self, path: str) -> list[str]:
        node = self._node(path)
        try:
            return sorted(self._reading(lambda: self._client.get_children(node), node))
        except NoNodeError:
            return []

    def apply(self, changes: Sequence[Change]) -> None:
        with self._lock:
            self._check(self._reading(lambda: self._multi(changes, None), self._root))
            self._note_applied(changes)

    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> Leadership | None:
        base = self._node(path)
        self._ensure_parents(f"{base}/leader/x")
        self._reading(self._delete_abandoned, base)
        lock = self._client.Lock(f"{base}/leader", identity)
        leadership = None
        try:
            leadership = self._stand(lock, base, timeout_s)
        finally:
            if leadership is None:
                self._abandon(lock)
        return leadership

    def _stand(self, lock: Any, base: str, timeout_s: float | None) -> Leadership | None:
        """Wait for the leadership; None if another one still leads when the time is over."""
        lost_before = self._lost_sessions
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining = None if deadline is None else max(deadline - time.monotonic(), _POLL_S)
            try:
                if lock.acquire(timeout=min(1.0, remaining) if remaining is not None else 1.0):
                    break
            except _LOST_REPLY as error:
                raise RetryableError(f"ZooKeeper at {self._hosts} went away during the election: {error}") from error
            except LockTimeout:
                pass
            except KazooException as error:
                raise self._named(error, base) from error
            if deadline is not None and time.monotonic() >= deadline:
                return None
        with self._lock:
            self._known.clear()
        epoch, version = self._new_epoch(f"{base}/epoch")
        return _ZooKeeperLeadership(self, base, epoch=epoch, version=version, lock=lock, lost_sessions=lost_before)

    def is_led(self, path: str) -> bool:
        return bool(self.children(f"{path}/leader"))

    def announce(self, path: str, data: bytes | None) -> None:
        node = self._node(path)
        try:
            if data is None:
                self._client.delete(node)
                return
            self._ensure_parents(node)
            try:
                self._client.set(node, data)
            except NoNodeError:
                self._client.create(node, data, ephemeral=True)
        except KazooException as error:
            raise self._named(error, node) from error

    def close(self) -> None:
        self._stop_giving_up()
        self._client.stop()
        self._client.close()

    # --- inside -----------------------------------------------------------------------------------

    def _abandon(self, lock: Any) -> None:
        """Delete the node of a candidate that does not lead, or no longer: kazoo ignores it when it
        cannot delete the node. If this fails, too, the next connection or the next election of this
        store deletes it."""
        with self._lock:
            self._abandoned.add((lock.path, lock.prefix))
        if self._client.client_state in _CONNECTED:
            self._delete_abandoned_once()

    def _delete_abandoned(self) -> None:
        with self._lock:
            abandoned = list(self._abandoned)
        for folder, prefix in abandoned:
            with suppress(NoNodeError):
                for name in self._client.get_children(folder):
                    if name.startswith(prefix):
                        self._client.delete(f"{folder}/{name}")
            with self._lock:
                self._abandoned.discard((folder, prefix))

    def _delete_abandoned_once(self) -> None:
        with suppress(KazooException):
            self._delete_abandoned()

    def _connect(self, timeout_s: float, security: ZooKeeperSecurity) -> None:
        """Wait for a connection.

        A server checks credentials after it has accepted the connection, and then drops it:
        kazoo's own ``start`` can take that for a timeout. The wait ends early when each server
        gives the same reason for a refusal twice.
        """
        connected = self._client.start_async()
        deadline = time.monotonic() + timeout_s
        before: list[str | None] = []
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not connected.wait(_POLL_S):
            if self._refused:
                raise self._named(AuthFailedError(), self._root)
            over = time.monotonic() >= deadline
            if not over and time.monotonic() < look_at:
                continue
            reasons = [security.explain(host, port) for host, port in self._client.hosts]
            found = next((each for each in reasons if each is not None), None)
            if found is not None and (over or (reasons == before and None not in reasons)):
                raise ConfigError(f"ZooKeeper at {found}")
            if over:
                raise RetryableError(
                    f"no ZooKeeper server at {self._hosts} answered within {timeout_s:g} s: check "
                    "transactional.zookeeper.servers and transactional.zookeeper.port, that a server runs there, and whether it "
                    "wants TLS (transactional.zookeeper.tls.*)"
                )
            before, look_at = reasons, time.monotonic() + _LOOK_EVERY_S

    def _node(self, path: str) -> str:
        parts = [part for part in path.split("/") if part]
        if any(part in (".", "..") or "\0" in part for part in parts):
            raise ConfigError(f"{path!r} is not usable as a ZooKeeper path: no '.', '..' or NUL component")
        return "/".join([self._root, *parts])

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._lost_sessions += 1
            self._refused = self._refused or self._client.client_state == KeeperState.AUTH_FAILED
        self._stop_giving_up()
        if state == KazooState.CONNECTED and self._abandoned:
            # in a thread of its own: this one has to receive the answers
            threading.Thread(target=self._delete_abandoned_once, name="ratchet-abandoned-nodes", daemon=True).start()
        if state == KazooState.SUSPENDED:
            self._giving_up = threading.Timer(self._give_up_after_s, self._give_up)
            self._giving_up.daemon = True
            self._giving_up.start()

    def _stop_giving_up(self) -> None:
        timer, self._giving_up = self._giving_up, None
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        """Request a new session. Servers whose data went back in time (restored or wiped) silently
        refuse, for ever, a client that has seen newer data. Without a new session, the old one
        would be neither kept nor lost."""
        if self._client.connected:
            return
        _log.warning("zookeeper.session_given_up", hosts=self._hosts, after_s=self._give_up_after_s)
        self._lost_sessions += 1
        self._client._reset_session()
        self._client.last_zxid = 0

    def _reading(self, call: Callable[[], T], node: str) -> T:
        """Repeat a call until a server answers. For calls that do not depend on a session."""
        warned = False
        while True:
            try:
                return call()
            except NoNodeError:
                raise
            except _LOST_REPLY as error:
                if self._refused:
                    raise self._named(AuthFailedError(), node) from error
                if self._client.state == KazooState.LOST and self._client._stopped.is_set():
                    raise RetryableError(f"the connection to ZooKeeper at {self._hosts} is closed") from error
                if not warned:
                    _log.warning("zookeeper.waiting", hosts=self._hosts, node=node, reason=type(error).__name__)
                    warned = True
                time.sleep(_POLL_S)
            except KazooException as error:
                raise self._named(error, node) from error

    def _named(self, error: KazooException, node: str) -> Exception:
        if isinstance(error, (AuthFailedError, SessionClosedRequireSaslError)):
            return ConfigError(
                f"ZooKeeper at {self._hosts} refused the credentials: check transactional.zookeeper.sasl.username and "
                ".sasl.password, or .auth"
            )
        if isinstance(error, NoAuthError):
            return ConfigError(f"ZooKeeper denies access to {node}: check the ACLs there and the credentials given")
        if isinstance(error, InvalidACLError):
            return ConfigError(
                f"ZooKeeper at {self._hosts} takes the credentials given for nobody's, so {node} cannot be kept for their bearer: "
                "have it check certificates (ssl.clientAuth=need), or give SASL or digest credentials"
            )
        return RetryableError(f"ZooKeeper at {self._hosts}, {node}: {type(error).__name__} {error}")

    def _ensure_parents(self, node: str) -> None:
        parent = posixpath.dirname(node)
        if parent not in self._ensured:
            self._reading(lambda: self._client.ensure_path(parent), parent)
            self._ensured.add(parent)

    def _names_in(self, parent: str) -> set[str]:
        """The names that exist below a node. Read only once, because afterwards only this process
        changes them."""
        if parent not in self._known:
            self._known[parent] = set(self._reading(lambda: self._client.get_children(parent), parent))
        return self._known[parent]

    def _check_size(self, changes: Sequence[Change]) -> None:
        """Raise ``ConfigError`` for a request that is too large. A server would give no reason: it
        would close the connection at every try."""
        sizes = {self._node(each.path): len(each.data) if isinstance(each, Put) else 0 for each in changes}
        total = sum(len(node) + size + _OPERATION_BYTES for node, size in sizes.items()) + 2 * _OPERATION_BYTES
        if total > _REQUEST_BYTES_MAX:
            largest = max(sizes, key=lambda node: sizes[node])
            raise ConfigError(
                f"ZooKeeper at {self._hosts} takes {_REQUEST_BYTES_MAX:,} bytes in one step, and {total:,} were to be written, "
                f"{sizes[largest]:,} of them to {largest}: divide the source among several topologies"
            )

    def _multi(self, changes: Sequence[Change], fence: tuple[str, bytes, int] | None) -> list[Any]:
        self._check_size(changes)
        transaction = self._client.transaction()
        if fence is not None:
            transaction.set_data(fence[0], fence[1], version=fence[2])
        for change in changes:
            node = self._node(change.path)
            parent, name = posixpath.split(node)
            self._ensure_parents(node)
            exists = name in self._names_in(parent)
            if isinstance(change, Put):
                if exists:
                    transaction.set_data(node, change.data)
                else:
                    transaction.create(node, change.data)
            elif exists:
                transaction.delete(node)
        results: list[Any] = transaction.commit()
        return results

    def _note_applied(self, changes: Sequence[Change]) -> None:
        for change in changes:
            parent, name = posixpath.split(self._node(change.path))
            if isinstance(change, Put):
                self._names_in(parent).add(name)
            else:
                self._names_in(parent).discard(name)

    def _check(self, results: Sequence[Any]) -> None:
        failed = [each for each in results if isinstance(each, Exception)]
        real = [each for each in failed if not isinstance(each, (RolledBackError, RuntimeInconsistency))]
        if failed:
            self._known.clear()
            if any(isinstance(each, (NodeExistsError, NoNodeError)) for each in real):
                raise CorruptStateError(
                    f"{self._root}: nodes appeared or vanished under this writer ({real[0]!r}); is something else writing "
                    "below the same root?"
                )
            raise self._named(real[0] if real else failed[0], self._root)

    def _new_epoch(self, node: str) -> tuple[int, int]:
        """Write a new epoch (invariant 2). Returns the epoch and the version of its node."""
        while True:
            try:
                data, stat = self._reading(lambda: self._client.get(node), node)
            except NoNodeError:
                try:
                    self._client.create(node, encode_document({"epoch": 0, "sequence": 0}, node))
                except (NodeExistsError, *_LOST_REPLY):
                    pass
                continue
            epoch, _ = fence_of(data, node)
            try:
                stat = self._client.set(node, encode_document({"epoch": epoch + 1, "sequence": 0}, node), stat.version)
            except (BadVersionError, *_LOST_REPLY):
                time.sleep(_POLL_S)
                continue  # read again; an epoch whose write got no reply is only skipped
            except KazooException as error:
                raise self._named(error, node) from error
            return epoch + 1, stat.version


def _note_granted_timeout(client: Any) -> Callable[[], float | None]:
    """Return a function that returns the session timeout that the servers granted, in seconds, or
    None. kazoo uses this number and does not expose it."""
    connection = client._connection
    invoke = connection._invoke
    granted: list[float] = []

    def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
        result = invoke(timeout, request, xid)
        if isinstance(request, Connect):
            granted[:] = [result[0].time_out / 1000]
        return result

    connection._invoke = noting
    return lambda: granted[0] if granted else None


class _ZooKeeperLeadership(FencedLeadership):
    def __init__(
        self, store: ZooKeeperStore, base: str, *, epoch: int, version: int, lock: Any, lost_sessions: int
    ) -> None:
        super().__init__(base, epoch, version)
        self._store = store
        self._lock = lock
        self._lost_sessions = lost_sessions
        self._resigned = False

    @property
    def lost(self) -> bool:
        return self._resigned or self._store._lost_sessions != self._lost_sessions

    def apply(self, changes: Sequence[Change]) -> None:
        with self._store._lock:
            super().apply(changes)
            self._store._note_applied(changes)

    def resign(self) -> None:
        if self._resigned:
            return
        self._resigned = True
        try:
            if self._store._client.client_state in _CONNECTED:
                self._lock.release()
                return
        except KazooException as error:
            _log.info("zookeeper.resign_failed", node=self._base, reason=type(error).__name__)
        self._store._abandon(self._lock)

    def _send(self, changes: Sequence[Change], fence: bytes, version: int) -> None:
        store = self._store
        try:
            results = store._multi(changes, (f"{self._base}/epoch", fence, version))
        except _LOST_REPLY as error:
            _log.warning("zookeeper.reply_lost", node=self._base, reason=type(error).__name__)
            store._known.clear()
            raise ReplyLost from error
        if isinstance(results[0], BadVersionError):
            raise FenceMoved
        store._check(results)

    def _read_fence(self) -> bytes | None:
        try:
            data: bytes = self._store._client.get(f"{self._base}/epoch")[0]
        except NoNodeError:
            return None
        except _LOST_REPLY as error:
            time.sleep(_POLL_S)
            raise ReplyLost from error
        except KazooException as error:
            raise self._store._named(error, self._base) from error
        return data
