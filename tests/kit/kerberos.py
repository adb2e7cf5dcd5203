"""A key distribution centre of MIT Kerberos, and a listener of Kafka for its principals."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from confluent_kafka import KafkaException, Producer

from integration.kafka import Listener
from integration.server import free_port, port_taken
from tests.kit.waiting import wait_for

REALM = "RATCHET.TEST"
CLIENT = f"orders@{REALM}"
#: The address of the listener is a part of its principal.
BROKER = f"kafka/127.0.0.1@{REALM}"
#: Debian's package puts the server's programs there, which is not on the PATH of every user.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_KRB5 = """[libdefaults]
default_realm = {realm}
dns_lookup_kdc = false
dns_lookup_realm = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{realm} = {{
  kdc = 127.0.0.1:{port}
}}
"""
_KDC = """[kdcdefaults]
kdc_listen = ""
kdc_tcp_listen = 127.0.0.1:{port}
[realms]
{realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/acl
}}
"""


@cache
def has_kerberos() -> bool:
    """Whether confluent-kafka was built with Kerberos."""
    try:
        Producer(
            {"bootstrap.servers": "127.0.0.1:1", "sasl.mechanism": "GSSAPI", "security.protocol": "SASL_PLAINTEXT"}
        )
    except KafkaException as error:  # without a keytab no client is made, in any case
        return "No provider" not in str(error)
    return True


def why_not_kerberos() -> str | None:
    """The reason why no test can use Kerberos; None if it can."""
    if not has_kerberos():
        return "this confluent-kafka was built without it"
    if shutil.which("krb5kdc", path=_PATH) is None or shutil.which("kinit") is None:
        return "krb5-kdc, krb5-admin-server or krb5-user is not installed"
    return None


class KeyCentre:
    """A KDC with the keys of the broker and of one client, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.config = folder / "krb5.conf"
        self._environment = {
            **os.environ,
            "PATH": _PATH,
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KeyCentre:
        self._folder.mkdir()
        words = {"realm": REALM, "port": self._port, "folder": self._folder}
        self.config.write_text(_KRB5.format(**words))
        (self._folder / "kdc.conf").write_text(_KDC.format(**words))
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "only-for-tests")
        self._process = subprocess.Popen(["krb5kdc", "-n"], env=self._environment, stdin=subprocess.DEVNULL)
        wait_for(self._listens, what="the KDC")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def keytab(self, principal: str) -> Path:
        """A file with the key of a principal, which is created."""
        path = self._folder / f"{principal.partition('@')[0].replace('/', '-')}.keytab"
        self._run("kadmin.local", "-q", f"addprinc -randkey {principal}")
        self._run("kadmin.local", "-q", f"ktadd -k {path} {principal}")
        return path

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "the KDC has ended"
        return port_taken(self._port)

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self._environment, check=True, capture_output=True)


@dataclass(frozen=True)
class KerberosListener(Listener):
    """A listener for Kerberos. ``config``: the ``krb5.conf``."""

    keytab: Path
    config: Path
    port: int = 0
    protocol = "SASL_PLAINTEXT"

    @property
    def java_options(self) -> Sequence[str]:  # type: ignore[override]
        return (f"-Djava.security.krb5.conf={self.config}",)

    def settings(self) -> dict[str, str]:
        return {
            "sasl.enabled.mechanisms": "GSSAPI",
            "sasl.kerberos.service.name": "kafka",
            "gssapi.sasl.jaas.config": (
                "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true "
                f'keyTab="{self.keytab}" principal="{BROKER}";'
            ),
        }

    def reads(self) -> tuple[Path, ...]:
        return (self.keytab, self.config)
