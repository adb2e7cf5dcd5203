"""One contract for every coordination store: atomic changes, and fenced leaders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState, KeeperState

from framework.coordination.security import ZooKeeperSecurity
from framework.errors import (
    ConfigError,
    CorruptStateError,
    LeadershipLostError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.transactions import CoordinationStore, Delete, Leadership, MemoryStore, Put, ZooKeeperStore
from integration import EmbeddedServers
from integration.server import free_port
from tests.kit.waiting import PATIENCE_S, WATCH_S


def elected(store: CoordinationStore, path: str) -> Leadership:
    leadership = store.lead(path, "test", timeout_s=PATIENCE_S)
    assert leadership is not None
    return leadership


def unanswered(*_: object) -> None:
    raise ConnectionLoss


class StoreContract:
    @pytest.fixture
    def stores(self) -> Iterator[list[CoordinationStore]]:
        """Two clients of one store, as two drivers have them."""
        raise NotImplementedError

    def test_changes_are_applied_and_read_by_others(self, stores: list[CoordinationStore], name: str) -> None:
        first, second = stores
        first.apply([Put(f"{name}/a/b", b"1"), Put(f"{name}/a/c", b"2")])
        first.apply([Put(f"{name}/a/b", b"3"), Delete(f"{name}/a/c"), Delete(f"{name}/a/never")])
        assert second.get(f"{name}/a/b") == b"3"
        assert second.get(f"{name}/a/c") is None
        assert second.children(f"{name}/a") == ["b"]
        assert second.children(f"{name}/nothing") == []

    @pytest.mark.rule("C3")
    def test_epochs_rise_with_every_leader(self, stores: list[CoordinationStore], name: str) -> None:
        for expected in (1, 2, 3):
            leadership = elected(stores[expected % 2], name)
            assert leadership.epoch == expected
            leadership.resign()

    def test_one_leads_and_the_next_one_waits(self, stores: list[CoordinationStore], name: str) -> None:
        first = elected(stores[0], name)
        assert stores[1].lead(name, "impatient", timeout_s=0.2) is None
        found: list[Leadership] = []
        waiting = threading.Thread(target=lambda: found.append(elected(stores[1], name)))
        waiting.start()
        first.resign()
        waiting.join(PATIENCE_S)
        assert found[0].epoch == 2

    def test_a_deposed_leader_writes_nothing(self, stores: list[CoordinationStore], name: str) -> None:
        """Invariant 9: its changes are refused as a whole,
        in the same step that checks the epoch.
        """
        deposed = elected(stores[0], name)
        deposed.apply([Put(f"{name}/x", b"first")])
        self.depose(stores[0], deposed, name)
        successor = elected(stores[1], name)
        with pytest.raises((StaleWriterError, LeadershipLostError)):
            deposed.apply([Put(f"{name}/x", b"late"), Put(f"{name}/y", b"late")])
        assert (stores[1].get(f"{name}/x"), stores[1].get(f"{name}/y")) == (b"first", None)
        successor.apply([Put(f"{name}/x", b"second")])
        assert stores[0].get(f"{name}/x") == b"second"

    def test_what_is_announced_is_read_by_others_until_it_is_taken_back(
        self, stores: list[CoordinationStore], name: str
    ) -> None:
        first, second = stores
        for text in (b"1", b"2"):
            first.announce(f"{name}/drivers/one", text)
            assert (second.get(f"{name}/drivers/one"), second.children(f"{name}/drivers")) == (text, ["one"])
        first.announce(f"{name}/drivers/one", None)
        assert second.children(f"{name}/drivers") == []

    def test_two_paths_have_leaders_of_their_own(self, stores: list[CoordinationStore], name: str) -> None:
        elected(stores[0], f"{name}-a")
        assert elected(stores[1], f"{name}-b").epoch == 1

    def depose(self, store: CoordinationStore, leadership: Leadership, name: str) -> None:
        """Make room for another leader while this one believes that it still leads."""
        raise NotImplementedError


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def stores(self) -> Iterator[list[CoordinationStore]]:
        store = MemoryStore()
        yield [store, store]

    def depose(self, store: CoordinationStore, leadership: Leadership, name: str) -> None:
        assert isinstance(store, MemoryStore)
        store.depose(name)


@pytest.mark.integration
class TestZooKeeperStore(StoreContract):
    @pytest.fixture
    def stores(self, servers: EmbeddedServers) -> Iterator[list[CoordinationStore]]:
        made: list[CoordinationStore] = [ZooKeeperStore(servers.zookeeper, "/stores") for _ in range(2)]
        yield made
        for store in made:
            store.close()

    def depose(self, store: CoordinationStore, leadership: Leadership, name: str) -> None:
        """Delete its place in the election without its knowledge:
        it believes that it still leads.
        """
        assert isinstance(store, ZooKeeperStore)
        for each in store._client.get_children(f"/stores/{name}/leader"):
            store._client.delete(f"/stores/{name}/leader/{each}")

    @pytest.mark.fault(12)
    @pytest.mark.rule("C3")
    def test_a_lost_reply_is_resolved_by_reading(
        self, stores: list[CoordinationStore], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C3, both cases: the write was applied and its reply was lost;
        or the write never arrived.
        """
        store = stores[0]
        assert isinstance(store, ZooKeeperStore)
        leadership = elected(store, name)
        real = store._multi
        applied: list[bool] = []

        def losing(*arguments: object) -> object:
            if len(applied) < 2:
                applied.append(bool(applied))
                if applied[-1]:
                    real(*arguments)  # type: ignore[arg-type]
                raise ConnectionLoss
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "_multi", losing)
        leadership.apply([Put(f"{name}/x", b"1")])
        assert applied == [False, True]
        leadership.apply([Put(f"{name}/x", b"2")])
        assert store.get(f"{name}/x") == b"2"

    @pytest.mark.fault(11)
    @pytest.mark.parametrize("next_one", [0, 1])
    def test_a_candidate_that_could_not_delete_its_node_lets_others_and_itself_lead(
        self, stores: list[CoordinationStore], name: str, monkeypatch: pytest.MonkeyPatch, next_one: int
    ) -> None:
        """Its session lasts, so the node would be in the election for ever."""
        given_up = stores[0]
        assert isinstance(given_up, ZooKeeperStore)
        first = elected(stores[1], name)
        with monkeypatch.context() as patched:
            patched.setattr(given_up._client, "delete", unanswered)
            assert given_up.lead(name, "impatient", timeout_s=0.2) is None
        assert len(given_up.children(f"{name}/leader")) == 2
        if next_one == 1:  # the one that gave up does not stand again, and is connected again
            given_up._on_state(KazooState.CONNECTED)
        first.resign()
        assert elected(stores[next_one], name).epoch == 2

    @pytest.mark.fault(11)
    @pytest.mark.parametrize("next_one", [0, 1])
    def test_a_leader_that_resigns_without_a_connection_lets_others_and_itself_lead(
        self, stores: list[CoordinationStore], name: str, monkeypatch: pytest.MonkeyPatch, next_one: int
    ) -> None:
        store = stores[0]
        assert isinstance(store, ZooKeeperStore)
        leadership = elected(store, name)
        with monkeypatch.context() as patched:
            patched.setattr(KazooClient, "client_state", KeeperState.CONNECTING)
            leadership.resign()
        if next_one == 1:
            store._on_state(KazooState.CONNECTED)
        assert elected(stores[next_one], name).epoch == 2

    @pytest.mark.fault(11)
    def test_a_lost_session_ends_the_leadership(
        self, stores: list[CoordinationStore], name: str, servers: EmbeddedServers
    ) -> None:
        store = ZooKeeperStore(servers.zookeeper, "/stores", session_timeout_s=2)
        leadership = elected(store, name)
        stolen = store._client.client_id
        successor = None
        for _ in range(30):
            # Open the same session on another connection. Closing that ends the session for both,
            # unless its owner was faster and has taken it back; also before the thief has it.
            thief = KazooClient(hosts=servers.zookeeper, client_id=stolen, timeout=2)
            with contextlib.suppress(KazooTimeoutError):
                thief.start()
            thief.stop()
            thief.close()
            successor = stores[1].lead(name, "test", timeout_s=WATCH_S)
            if successor is not None:
                break
        assert successor is not None
        assert successor.epoch == leadership.epoch + 1
        with pytest.raises((LeadershipLostError, StaleWriterError)):
            leadership.apply([Put(f"{name}/x", b"late")])
        store.close()

    def test_a_multi_of_any_size_is_one_write(self, stores: list[CoordinationStore], name: str) -> None:
        leadership = elected(stores[0], name)
        leadership.apply([Put(f"{name}/plans/{number}", b"x") for number in range(500)])
        assert len(stores[1].children(f"{name}/plans")) == 500

    def test_a_step_that_is_larger_than_zookeeper_takes_is_refused_and_named(
        self, stores: list[CoordinationStore], name: str
    ) -> None:
        """A server that gets such a request closes the connection without a word, at every try."""
        leadership = elected(stores[0], name)
        errors: list[Exception] = []

        def write() -> None:
            try:
                leadership.apply([Put(f"{name}/plans/{number}", b"x" * 400_000) for number in range(3)])
            except RatchetError as error:
                errors.append(error)

        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(PATIENCE_S)
        assert [type(each) for each in errors] == [ConfigError]
        assert f"/stores/{name}/plans/0" in str(errors[0]) and "1,200," in str(errors[0])
        leadership.apply([Put(f"{name}/plans/{number}", b"x" * 340_000) for number in range(3)])
        assert len(stores[1].children(f"{name}/plans")) == 3

    def test_garbage_in_the_epoch_is_named(self, stores: list[CoordinationStore], name: str) -> None:
        stores[0].apply([Put(f"{name}/epoch", b"garbage")])
        with pytest.raises(CorruptStateError, match=f"/stores/{name}/epoch"):
            stores[0].lead(name, "test", timeout_s=PATIENCE_S)


@pytest.mark.integration
@pytest.mark.behaviour("1.13")
def test_zookeeper_keeps_everything_below_a_chroot(servers: EmbeddedServers, name: str) -> None:
    inside = ZooKeeperStore(f"{servers.zookeeper}/{name}/team", "/root")
    whole = ZooKeeperStore(servers.zookeeper, f"/{name}/team/root")
    try:
        inside.apply([Put("topology/x", b"1")])
        assert whole.get("topology/x") == b"1"
        assert not whole.children("team")
    finally:
        inside.close()
        whole.close()


@pytest.mark.parametrize("root", ["", "/", "relative", "/a/../b", "/a\0b", "/a\nb"])
def test_zookeeper_bad_root_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"transactional\.zookeeper\.root"):
        ZooKeeperStore("127.0.0.1:1", root)


def test_zookeeper_that_does_not_answer_is_named() -> None:
    with pytest.raises(RetryableError, match="no ZooKeeper server at .* answered"):
        ZooKeeperStore(f"127.0.0.1:{free_port()}", "/x", connect_timeout_s=0.5)


@pytest.mark.integration
@pytest.mark.behaviour("1.13")
def test_zookeeper_acl_that_denies_is_named_and_credentials_protect_every_znode(
    servers: EmbeddedServers, name: str
) -> None:
    store = ZooKeeperStore(servers.zookeeper, f"/{name}", security=ZooKeeperSecurity(digest="ratchet:canary"))
    leadership = elected(store, "topology")
    leadership.apply([Put("topology/coordinator/currtx", b"1")])
    for path in ("", "/topology", "/topology/epoch", "/topology/coordinator", "/topology/coordinator/currtx"):
        acls, _ = store._client.get_acls(f"/{name}{path}")
        assert all(acl.id.scheme == "digest" for acl in acls), path
    with pytest.raises(ConfigError, match=f"ZooKeeper denies access to /{name}") as refused:
        ZooKeeperStore(servers.zookeeper, f"/{name}").get("topology/coordinator/currtx")
    assert "canary" not in str(refused.value)
    store.close()
