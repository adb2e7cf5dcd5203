"""Archives of classes, with which the JVMs of a test run start in half the CPU time.

A JVM spends most of its start in loading and verifying the same few thousand classes. Java can
keep them in a file and map that file (JEP 350). ``use`` makes every later JVM of this process and
its children look for such files; ``python -m tests.kit.class_archives`` makes those that are
missing, by running each program once. A JVM ignores a file that is missing, or was made by
another Java or of other jars.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient

from integration import KafkaBroker, ServerError, ZooKeeperServer
from integration.jars import KAFKA_VERSION
from integration.java import find_java
from integration.kafka import CHECKPOINT
from integration.server import QUICK
from tests.kit.waiting import PATIENCE_S

#: The environment variable with options of the Java of Spark's driver.
SPARK_OPTIONS = "SPARK_SUBMIT_OPTS"
#: Executors live for seconds too. No ``SPARK_CONF_DIR`` says so: Java takes no archive where a
#: folder with files is on the class path.
_EXECUTORS = f'--conf "spark.executor.extraJavaOptions={" ".join(QUICK)}" pyspark-shell'
_FOLDER = Path(sys.prefix) / "class-archives"  # the jars of an environment are its own
#: Rises with each change of a class path: Java takes only archives that were made with the same.
_CLASS_PATHS = 2
#: A copy of the file that Kafka's format tool, another Java program, writes.
_CHECKPOINT = _FOLDER / f"kafka-{KAFKA_VERSION}.checkpoint"


def use() -> None:
    """Let the JVMs of Kafka, ZooKeeper and Spark map their archives, from now on."""
    try:
        java = find_java()
    except ServerError:
        return  # who needs Java says so
    KafkaBroker.java_options = (*QUICK, "-XX:-UsePerfData", *_reading(_archive(java, "kafka")))
    ZooKeeperServer.java_options = (*QUICK, *_reading(_archive(java, "zookeeper")))
    KafkaBroker.checkpoint = _CHECKPOINT if _CHECKPOINT.exists() else None
    os.environ[SPARK_OPTIONS] = " ".join((*QUICK, *_reading(_archive(java, "spark"))))
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", _EXECUTORS)


def make_beside(*names: str) -> None:
    """Make those of the named archives that are missing, in a process of its own that nobody waits
    for."""
    try:
        java = find_java()
    except ServerError:
        return
    missing = [name for name in names if not _archive(java, name).exists()]
    if missing:
        nowhere = subprocess.DEVNULL
        command = [sys.executable, "-m", __name__, *missing]
        maker = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
        maker.returncode = 0  # otherwise Python warns that it still runs


def make(names: Collection[str]) -> None:
    """Make those of the named archives that are missing, unless somebody else does so now; all of
    them without a name."""
    _FOLDER.mkdir(exist_ok=True)
    java = find_java()
    with open(_FOLDER / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        makers: dict[str, Callable[[Sequence[str]], None]] = {
            "spark": _run_spark,
            "kafka": _run_kafka,
            "zookeeper": _run_zookeeper,
        }
        for name, run in makers.items():
            archive = _archive(java, name)
            if (name in names or not names) and not archive.exists():
                part = archive.with_suffix(f".{os.getpid()}")
                run(["-Xlog:disable", f"-XX:ArchiveClassesAtExit={part}"])
                part.replace(archive)


def _archive(java: str, name: str) -> Path:
    found = os.stat(java)
    return _FOLDER / f"{name}-{_CLASS_PATHS}-{found.st_size}-{found.st_mtime_ns}.jsa"


def _reading(archive: Path) -> list[str]:
    # Without a log: Java would warn on the standard output about an archive that it ignores.
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:disable"]


def _run_kafka(options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        broker = KafkaBroker(Path(folder), where="embedded")
        broker.prepare()  # formats the folder: that Java must not write the archive
        part = _CHECKPOINT.with_suffix(f".{os.getpid()}")
        shutil.copyfile(broker.folder / "data" / CHECKPOINT, part)
        part.replace(_CHECKPOINT)
        broker.java_options = (*QUICK, *options)
        broker.start()
        admin = AdminClient({"bootstrap.servers": broker.address})
        for created in admin.create_topics([NewTopic("t", 1)]).values():
            created.result(PATIENCE_S)
        broker.stop()


def _run_zookeeper(options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = ZooKeeperServer(Path(folder), where="embedded")
        server.java_options = (*QUICK, *options)
        with server:
            client = KazooClient(server.address)
            client.start(PATIENCE_S)
            client.create("/archived", b"", ephemeral=True)
            client.stop()
            client.close()


def _run_spark(options: Sequence[str]) -> None:
    job = (
        "from framework.execution.spark.spark_context import start_context\n"
        "context = start_context('classes', {'spark.master': 'local[2]'})\n"
        "context.parallelize(range(4), 2).map(str).collect()\n"
        "java = context._gateway.proc\n"
        "context.stop()\n"
        "context._gateway.shutdown()\n"
        "java.stdin.close()\n"
        "java.wait()\n"  # it writes the archive at its end
    )
    subprocess.run(
        [sys.executable, "-c", job],
        env={**os.environ, SPARK_OPTIONS: " ".join((*QUICK, *options))},
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    make(sys.argv[1:])
