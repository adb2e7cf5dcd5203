"""The servers' jars. PySpark contains those of ZooKeeper. Those of Kafka, of Kafka Connect with
Debezium, and of Apicurio Registry are fetched once from Maven Central by Ivy, which PySpark also
contains, checked against ``*.sha256`` beside this file, and kept per user.

The cache is complete or absent: jars are fetched into a separate folder, checked, and moved into
place in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.local_paths import lock_opener
from integration.errors import ServerError
from integration.folder_permissions import warn_of_others
from integration.java import find_java

KAFKA_VERSION = "4.3.0"
KAFKA_MODULE = ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION)
LOCK_FILE = Path(__file__).with_name("kafka-jars.sha256")
DEBEZIUM_VERSION = "3.5.0.Final"
CONNECT_LOCK_FILE = Path(__file__).with_name("connect-jars.sha256")
#: The last version that runs on Java 17.
APICURIO_VERSION = "2.6.13.Final"
_APICURIO_LOCK_FILE = Path(__file__).with_name("apicurio-jars.sha256")
_IVY_FILE = """<ivy-module version="2.0" xmlns:e="http://ant.apache.org/ivy/extra">
<info organisation="ratchet" module="jars"/>
<configurations><conf name="default"/></configurations>
<dependencies>{dependencies}</dependencies>
</ivy-module>
"""
FETCH_TIMEOUT_S = 900
#: The classes by which a setting of a broker refers to files and variables: ``${file:/path:key}``.
_CONFIG_PROVIDERS = tuple(
    f"org/apache/kafka/common/config/provider/{each}ConfigProvider" for each in ("Directory", "EnvVar", "File")
)
#: A public class of Java 8 without members, below ``Object``. Its own name comes first in its pool
#: of constants, as ``length, name``.
_EMPTY_CLASS = (
    bytes.fromhex("cafebabe 0000 0034 0005 01"),
    bytes.fromhex("07 0001 01 0010")
    + b"java/lang/Object"
    + bytes.fromhex("07 0003 0021 0002 0004 0000 0000 0000 0000"),
)
# a fixed date, so that the jar's bytes depend on its content alone
_EPOCH = (1980, 1, 1, 0, 0, 0)

#: The jars inside PySpark that Kafka's logging needs, and those that ZooKeeper needs.
KAFKA_LOGGING_JARS = ("slf4j-api-2*", "log4j-slf4j2-impl-2*", "log4j-api-2*", "log4j-core-2*")
ZOOKEEPER_JARS = (
    "zookeeper-*",
    "netty-*",
    "slf4j-api-*",
    "log4j-*",
    "metrics-core-*",
    "snappy-java-*",
    "commons-*",
    "jackson-*",
)

Progress = Callable[[str], None]


def spark_jars() -> Path:
    """The folder of jars inside PySpark. PySpark itself is not imported."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("PySpark is not installed: its jars hold ZooKeeper and Ivy; install Ratchet's requirements")
    return Path(next(iter(spec.submodule_search_locations))) / "jars"


def cache_folder() -> Path:
    """Where downloads are kept: ``RATCHET_CACHE``, or else the user's cache folder."""
    configured = os.environ.get("RATCHET_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratchet"


def kafka_jars(progress: Progress | None = None) -> Path:
    """The folder of Kafka's jars. Fetches them if they are missing. ``progress`` gets a line per
    step.

    Raises ``ServerError``: no network, a download that does not match its checksum, no room on the
    disk.
    """
    return _kept(_Jars(f"Apache Kafka {KAFKA_VERSION}", f"kafka-{KAFKA_VERSION}", LOCK_FILE), progress)


def no_config_providers() -> Path:
    """A jar that belongs in front of Kafka's: the classes of the same names in it are no config
    providers. Every client may change the settings of a plain broker, and the answer to a wrong
    value contains the value: a client could read the files and variables of the broker's user.

    Raises ``ServerError`` when it cannot be written."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for each in _CONFIG_PROVIDERS:
            name = each.encode()
            written = _EMPTY_CLASS[0] + struct.pack(">H", len(name)) + name + _EMPTY_CLASS[1]
            archive.writestr(zipfile.ZipInfo(f"{each}.class", _EPOCH), written)
    jar = cache_folder() / "no-config-providers.jar"
    with _one_at_a_time(jar):
        try:
            if not jar.is_file() or jar.read_bytes() != content.getvalue():
                part = jar.with_suffix(".part")
                part.write_bytes(content.getvalue())
                part.replace(jar)
        except OSError as error:
            raise ServerError(f"{jar}: {error.strerror or error}; make it writable, or set RATCHET_CACHE") from error
    return jar


def connect_jars(progress: Progress | None = None) -> Path:
    """The folder of the jars of Kafka Connect and Debezium, as ``kafka_jars``."""
    name = f"Kafka Connect {KAFKA_VERSION} with Debezium {DEBEZIUM_VERSION}"
    return _kept(_Jars(name, f"connect-{KAFKA_VERSION}-{DEBEZIUM_VERSION}", CONNECT_LOCK_FILE), progress)


def apicurio_archive(progress: Progress | None = None) -> Path:
    """The archive of Apicurio Registry, as ``kafka_jars``."""
    jars = _Jars(f"Apicurio Registry {APICURIO_VERSION}", f"apicurio-{APICURIO_VERSION}", _APICURIO_LOCK_FILE)
    return _kept(jars, progress) / next(iter(jars.locked()))


@dataclass(frozen=True, slots=True)
class _Jars:
    """The jars of one program. ``lock_file``: a line for each jar with its SHA-256, and its file
    name or ``group:artifact:version``, with ``:classifier:extension`` where it is another file than
    the module's jar. With coordinates, exactly these are fetched, otherwise all that
    ``KAFKA_MODULE`` needs."""

    title: str
    folder: str
    lock_file: Path

    def locked(self) -> dict[str, str]:
        """File name -> SHA-256."""
        return {_file_name(what): digest for digest, what in self._lines()}

    def wanted(self, staging: Path) -> list[str]:
        """Ivy's arguments that name the jars to fetch."""
        coordinates = [what.split(":") for _, what in self._lines() if ":" in what]
        if not coordinates:
            return ["-confs", "default,runtime", "-types", "jar", "bundle", "-dependency", *KAFKA_MODULE]
        lines = [_dependency(*each) for each in coordinates]
        (staging / "ivy.xml").write_text(_IVY_FILE.format(dependencies="".join(lines)), encoding="utf-8")
        return [
            "-ivy",
            str(staging / "ivy.xml"),
            "-confs",
            "default",
            "-types",
            "jar",
            "bundle",
            "maven-plugin",
            "tar.gz",
        ]

    def mismatch(self, folder: Path) -> str | None:
        """The problem of a folder of jars; None if there is none."""
        expected = self.locked()
        for name, digest in expected.items():
            jar = folder / name
            if not jar.is_file():
                return f"{name} is missing"
            if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
                return f"{name} does not match its SHA-256 in {self.lock_file.name}"
        extra = sorted(path.name for path in folder.glob("*.jar") if path.name not in expected)
        return f"{extra[0]} is not in {self.lock_file.name}" if extra else None

    def _lines(self) -> list[tuple[str, str]]:
        lines = [line.split() for line in self.lock_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(digest, what) for digest, what in lines]


def _dependency(group: str, name: str, version: str, classifier: str = "", extension: str = "") -> str:
    """A file of Maven Central, for Ivy."""
    attributes = f'org="{group}" name="{name}" rev="{version}" transitive="false" conf="default->master"'
    if not classifier:
        return f"<dependency {attributes}/>"
    file = f'name="{name}" type="{extension}" ext="{extension}" e:classifier="{classifier}"'
    return f"<dependency {attributes}><artifact {file}/></dependency>"


def _file_name(what: str) -> str:
    """The file name of a line in a lock file."""
    if ":" not in what:
        return what
    _, name, version, *other = what.split(":")
    return f"{name}-{version}-{other[0]}.{other[1]}" if other else f"{name}-{version}.jar"


def _kept(jars: _Jars, progress: Progress | None) -> Path:
    """The folder of these jars in the cache."""
    say = progress or _say
    target = cache_folder() / jars.folder
    with _one_at_a_time(target):
        if target.is_dir():
            wrong = jars.mismatch(target)
            if wrong is None:
                return target
            say(f"cached jars of {jars.title} are damaged ({wrong}); fetching them again")
            shutil.rmtree(target)
        _fetch(target, jars, say)
    return target


def _fetch(target: Path, jars: _Jars, say: Progress) -> None:
    java = find_java()
    staging = Path(tempfile.mkdtemp(prefix="jars-", dir=target.parent))
    count = len(jars.locked())
    try:
        ivy = next(iter(sorted(spark_jars().glob("ivy-*.jar"))), None)
        if ivy is None:
            raise ServerError(f"there is no ivy jar in {spark_jars()}: reinstall PySpark")
        # Temporary files, too, are where no other user can replace them.
        command = [java, f"-Djava.io.tmpdir={staging}", "-cp", str(ivy), "org.apache.ivy.Main", *jars.wanted(staging)]
        command += ["-cache", str(staging / "ivy"), "-retrieve"]
        command += [f"{staging}/jars/[artifact]-[revision](-[classifier]).[ext]"]
        say(f"fetching {jars.title} ({count} files) from Maven Central, once")
        tail = _run_ivy(command, count, say)
        made = staging / "jars"
        wrong = jars.mismatch(made) if made.is_dir() else "nothing arrived"
        if wrong is not None:
            raise ServerError(
                f"fetching the jars of {jars.title} failed: {wrong}. {_reason(tail)} Check the network connection and "
                f"try again; whoever has no network can copy the jars named in {jars.lock_file.name} to {target}"
            )
        made.rename(target)
    except OSError as error:
        raise ServerError(
            f"{target.parent}: {error.strerror or error}; make room there, or set RATCHET_CACHE"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _run_ivy(command: list[str], jars: int, say: Progress) -> list[str]:
    """Run Ivy, with a line of progress for every tenth jar. Returns the end of its output."""
    tail: list[str] = []
    done = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            tail = [*tail[-40:], line.strip()]
            if "[SUCCESSFUL ]" in line:
                done += 1
                if done % 10 == 0 or done == jars:
                    say(f"fetched {done} of {jars} jars")
        process.wait(FETCH_TIMEOUT_S)
    return tail


def _reason(tail: list[str]) -> str:
    """The reason in Ivy's output, if there is one."""
    signs = (
        "Server access error",
        "No space left",
        "UnknownHostException",
        "Connection refused",
        "unresolved dependency",
    )
    line = next((line for line in tail if any(sign in line for sign in signs)), "")
    return f"Ivy says: {line[:200]}." if line else ""


@contextlib.contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Lock the cache, so that two processes that start together fetch once."""
    warn_of_others(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = open(target.with_name(f"{target.name}.lock"), "w", encoding="utf-8", opener=lock_opener)  # noqa: SIM115 - closed below, after unlocking
    except OSError as error:
        raise ServerError(
            f"{target.parent}: {error.strerror or error}; make it writable, or set RATCHET_CACHE"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def find_jars(patterns: Sequence[str]) -> list[Path]:
    """The jars of PySpark that match the patterns."""
    return [jar for pattern in patterns for jar in sorted(spark_jars().glob(f"{pattern}.jar"))]
