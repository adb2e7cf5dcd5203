"""Configuration: eager, typed, and every complaint names its key."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from framework import Config
from framework.config import HIDDEN, resolved_address, shown_host
from framework.coordination.zookeeper import ZooKeeperStore
from framework.errors import ConfigError


def test_defaults_are_those_of_storm() -> None:
    config = Config.of({})
    assert (config.max_spout_pending, config.message_timeout_secs) == (1, 30.0)
    assert config.zookeeper_hosts() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topology.max.spout.pendign": 2}, r"'topology.max.spout.pendign': did you mean 'topology.max.spout.pending'"),
        ({"nonsense": 2}, r"unknown key 'nonsense': the known keys are .*topology.message.timeout.secs"),
        ({"topology.max.spout.pending": 0}, r"topology.max.spout.pending: .*greater than or equal to 1, not 0"),
        ({"topology.max.spout.pending": -3}, r"topology.max.spout.pending: "),
        ({"topology.max.spout.pending": 10**9}, r"topology.max.spout.pending: .*less than"),
        ({"topology.max.spout.pending": "four"}, r"topology.max.spout.pending: .*integer, not 'four'"),
        ({"topology.max.spout.pending": True}, r"topology.max.spout.pending: "),
        ({"topology.message.timeout.secs": 0}, r"topology.message.timeout.secs: .*greater than 0"),
        ({"transactional.zookeeper.port": 70_000}, r"transactional.zookeeper.port: "),
        ({"transactional.zookeeper.root": "relative"}, r"transactional.zookeeper.root: must be an absolute path"),
        ({"transactional.zookeeper.root": "/a/../b"}, r"transactional.zookeeper.root: "),
        ({"transactional.zookeeper.auth": "canary"}, r"zookeeper.auth: must be digest:user:password; [^']+$"),
        *(
            pytest.param(values, message, marks=pytest.mark.rule("C10"))
            for values, message in (
                ({"spark.task.maxFailures": 4}, r"spark.task.maxFailures cannot be set: Spark must repeat nothing"),
                ({"spark.stage.maxConsecutiveAttempts": 4}, r"spark.stage.maxConsecutiveAttempts cannot be set"),
                ({"spark.speculation": True}, r"spark.speculation cannot be set"),
                ({"spark.master": "local[2,4]"}, r"local\[N,F\] repeats failed tasks; use local\[2\]"),
            )
        ),
    ],
)
def test_bad_values_are_refused_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.of(values)


def test_zookeeper_servers_without_a_port_get_the_configured_one() -> None:
    config = Config.of({"transactional.zookeeper.servers": ["a", "b:2182"], "transactional.zookeeper.port": 2200})
    assert config.zookeeper_hosts() == "a:2200,b:2182"
    assert Config.of({"transactional.zookeeper.servers": "a, b"}).zookeeper_hosts() == "a:2181,b:2181"


@pytest.mark.parametrize(
    ("servers", "hosts"),
    [
        ("a:1,b:2/team", "a:1,b:2/team"),
        (["a", "b/team/ours"], "a:2181,b:2181/team/ours"),
        (["a,b:2182"], "a:2181,b:2182"),
        ("[::1]:2200,[fe80::2]", "[::1]:2200,[fe80::2]:2181"),
        ("zk_1.example-2.com", "zk_1.example-2.com:2181"),
        (" ", None),
    ],
)
def test_zookeeper_servers_may_have_one_chroot_at_the_end(servers: object, hosts: str | None) -> None:
    assert Config.of({"transactional.zookeeper.servers": servers}).zookeeper_hosts() == hosts


BAD_ZOOKEEPER = {
    "http://a:2181": "a URL is not",
    "a:1,zk://b": "a URL is not",
    "a:1/x,b:2/x": "'a:1/x' has a chroot of its own",
    "a:1/x,b:2": "'a:1/x' has a chroot of its own",
    "a:1;b:2": "'a:1;b:2' is not a host",
    "a:1 b:2": "'a:1 b:2' is not a host",
    "a :1": "'a :1' is not a host",
    "a\tb": r"'a\\tb' is not a host",
    "a:2181:2888": "'a:2181:2888' is not a host",
    "a:": "'a:' is not a host",
    "a:x": "'a:x' is not a host",
    "a:+5": r"'a:\+5' is not a host",
    "me:secret@a": "a user does not belong in an address: set transactional.zookeeper.auth",
    "::1": "'::1' is not a host",
    "a:0": "'a:0' has no port from 1 to 65535",
    "a:65536": "'a:65536' has no port",
    "/x": "a server is missing",
    "a:1/": "the chroot '/' is not a path",
    "a:1/x/": "the chroot '/x/' is not a path",
    "a:1//x": "the chroot '//x' is not a path",
    "a:1/x/../y": r"the chroot '/x/\.\./y' is not a path",
    "a:1/.": r"the chroot '/\.' is not a path",
    "a:1/x y": "the chroot '/x y' is not a path",
    "a:1/x\0": "the chroot .* is not a path",
}


@pytest.mark.parametrize("servers", BAD_ZOOKEEPER)
def test_zookeeper_servers_that_are_no_address_are_refused_by_name(servers: str) -> None:
    """The store reads them with the same parser, also where no configuration is."""
    for refused in (
        lambda: Config.of({"transactional.zookeeper.servers": servers}),
        lambda: Config.of({"transactional.zookeeper.servers": servers.split(",")}),
        lambda: ZooKeeperStore(servers, "/ratchet"),
    ):
        with pytest.raises(ConfigError, match=rf"^transactional\.zookeeper\.servers: {BAD_ZOOKEEPER[servers]}"):
            refused()


def test_toml_tables_become_dotted_keys_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[topology]\nmax.spout.pending = 4\n"message.timeout.secs" = 10\n[app]\nkafka = "h:1"\n')
    config = Config.load(file, ["topology.max.spout.pending=2", "app.database=x.db", "spark.ui.enabled=true"])
    assert (config.max_spout_pending, config.message_timeout_secs) == (2, 10)
    assert dict(config.app) == {"app.kafka": "h:1", "app.database": "x.db"}
    assert dict(config.spark) == {"spark.ui.enabled": "true"}


def test_a_byte_order_mark_as_editors_on_windows_write_it_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("topology.max.spout.pending = 4\n", encoding="utf-8-sig")
    assert Config.load(file).max_spout_pending == 4


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such configuration file"), ("a = ", "run.toml: "), (b"\xff", "run.toml: ")]
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        Config.load(file)


@pytest.mark.parametrize(
    "content",
    [
        '"topology.max.spout.pending" = 4\n[topology.max.spout]\npending = 5',
        '[topology]\n"max.spout.pending" = 5\nmax.spout.pending = 4',
    ],
)
def test_a_key_that_is_given_twice_in_a_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"topology\.max\.spout\.pending is given twice"):
        Config.load(path)


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="write KEY=VALUE"):
        Config.load(None, ["topology.max.spout.pending"])


def test_secrets_are_not_shown_and_do_not_reach_components() -> None:
    config = Config.of({"transactional.zookeeper.auth": "digest:me:canary"})
    assert "canary" not in repr(config)
    assert "canary" not in str(config.for_components())


#: Other programs write their names in other ways.
SPARK_SECRETS = (
    "spark.executorEnv.PGPASSWORD",
    "spark.executorEnv.DB_PASS",
    "spark.yarn.appMasterEnv.STRIPE_API_KEY",
    "spark.ssl.keyPassword",
    "spark.hadoop.fs.s3a.encryption.key",
    "spark.hadoop.fs.s3a.server-side-encryption.key",
    "spark.hadoop.javax.jdo.option.ConnectionPassword",
)


@pytest.mark.parametrize(
    "values",
    [
        {"topology.state.provider.config": '{"password": "can"ary"}'},
        {"topology.state.provider.config": ["canary"]},
        {"tracing.otlp.endpoint": ["http://ann:canary@host"]},
        {"transactional.zookeeper.servers": "digest:ann:canary@zk:2181"},
        {"topology.history.table": ["postgresql://ann:canary@host"]},
        {"ui.token": ["canary"]},
    ],
)
def test_a_refused_value_that_may_be_a_secret_is_not_shown(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.of(values)
    told = str(raised.value)
    assert next(iter(values)) in told and "canary" not in told and 'can"ary' not in told


def test_a_configuration_does_not_print_the_settings_of_others() -> None:
    secrets = {"spark.executorEnv.PGPASSWORD": "canary", "app.any": "canary", "kafka.any": "canary"}
    nested = {"topology.state.provider.config": {"servers": [{"password": "canary"}]}}
    assert "canary" not in repr(Config.of({**secrets, **nested}))


def test_what_is_shown_of_a_configuration_hides_whatever_may_be_a_secret() -> None:
    secrets = {
        "kafka.sasl.password": "canary-1",
        "kafka.sasl.oauthbearer.extensions": "key=canary-12",
        "kafka.sasl.kerberos.kinit.cmd": "echo canary-13 | kinit me",
        "tracing.otlp.endpoint": "https://traces.example/v1?apikey=canary-14",
        "kafka.schema.registry.url": "https://ann:canary-2@registry.example",
        "spark.hadoop.fs.s3a.access.key": "canary-3",
        "spark.driver.extraJavaOptions": "-Dpassword=canary-4",
        "app.database": "postgresql://ann:canary-5@host/db",
        "app.list": ["canary-6"],
        "topology.state.provider.config": {"password": "canary-7", "other": "canary-8"},
        "transactional.zookeeper.auth": "digest:ann:canary-9",
        "ui.token": "canary-10-canary-10",
        "app.token": 12345,
        "spark.hadoop.cache": "redis://:can/ary@host:6379/0",
        **dict.fromkeys(SPARK_SECRETS, "canary-11"),
    }
    config = Config.of({**secrets, "spark.master": "local[2]", "app.level": 7, "kafka.bootstrap.servers": "a:1,b:2"})
    shown = {key: (value, given) for key, value, given in config.shown()}
    assert {key: shown[key] for key in secrets} == dict.fromkeys(secrets, (HIDDEN, True))
    assert "canary" not in repr(shown).replace("/", "") and "12345" not in repr(shown)
    assert shown["spark.master"] == ("local[2]", True) and shown["kafka.bootstrap.servers"] == ("a:1,b:2", True)
    assert shown["app.level"] == ("7", True) and shown["ui.host"] == ("127.0.0.1", False)


def test_the_address_of_the_page_is_one_that_a_browser_takes() -> None:
    assert Config.of({}).ui_address is None
    assert Config.of({"ui.port": 8470}).ui_address == "http://127.0.0.1:8470/"
    assert Config.of({"ui.port": 8470, "ui.host": "::1"}).ui_address == "http://[::1]:8470/"
    everywhere = Config.of({"ui.port": 8470, "ui.host": "0.0.0.0", "ui.tls.certificate": "page.pem"}).ui_address
    assert everywhere == f"https://{socket.gethostname()}:8470/"


@pytest.mark.parametrize(
    ("address", "ends"),
    [
        ("postgresql://u:p@host:5432?sslmode=require", "/"),
        ("postgresql:///db?host=/var/run/postgresql", "/"),
        ("postgresql://u:p%2F%40@one:1,two:2/db?target_session_attrs=any", "/"),
        ("postgresql://[::1]:5432/db?options=-c%20a@b", "/"),
        ("host=one password='a/b@c'", "/"),
        ("postgresql://u:p@one?application_name=a@b", "/"),
        ("rediss://u:p@host:6379/0?ssl_cert_reqs=none", "/?#"),
        ("redis://[::1]:6379/0?client_name=a@b", "/?#"),
        ("unix://:p@/run/redis@home.sock?db=1", "/?#"),
    ],
)
def test_every_form_of_an_address_is_taken_as_it_is(address: str, ends: str) -> None:
    assert resolved_address("the address", address, ends) == address


@pytest.mark.parametrize("ends", ["/", "/?#"])
@pytest.mark.parametrize("user", ["alice@srv:hunter2", "alice:hun@ter2", "alice:hun@ter2:3", "@:hunter2"])
def test_an_at_sign_in_a_user_or_password_is_refused(user: str, ends: str) -> None:
    """libpq ends both at the first one, and would take the rest for the host."""
    with pytest.raises(ConfigError, match="does not parse: .* %40 for @") as refused:
        resolved_address("the address", f"postgresql://{user}@srv.postgres.example/x", ends)
    assert "ter2" not in str(refused.value)


@pytest.mark.parametrize("host", ["a-b.example", "10.0.0.1", "::1", "fe80::1%eth0", "/var/run/postgresql", "a,b", ""])
def test_a_host_is_shown(host: str) -> None:
    assert shown_host(host) == host


@pytest.mark.parametrize("host", ["srv:hunter2@srv", "hunter2@srv", "a,u:hunter2", "a b", "hun?ter2"])
def test_what_is_no_host_is_not_shown(host: str) -> None:
    assert shown_host(host) == HIDDEN
