"""A standalone Spark cluster on this machine: a master and workers, from the jars inside
PySpark."""

from __future__ import annotations

import json
import re
import secrets
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.jars import spark_jars
from integration.server import Server, free_port, port_taken, start_together, stop_all, wait_until
from integration.server_launcher import EMBEDDED

_ANSWER_TIMEOUT_S = 60.0
_REGISTER_TIMEOUT_S = 240.0
#: The command line of a Python daemon: Spark's own, or Ratchet's replacement.
_DAEMON = re.compile(r"-m (pyspark\.daemon|framework\.execution\.spark\.daemon)\b")


class _SparkProcess(Server):
    """Always a process on this machine, never a container: it starts executors, which start the
    Python that is installed here."""

    kind = "spark"
    private = False  # executors write the files of users' sinks, whose readers may be others
    main = ""

    def __init__(self, folder: Path, port: int | None = None, *, secret: str, guarded: bool = True) -> None:
        super().__init__(folder, port, guarded=guarded, where=EMBEDDED)
        self.page_port = free_port()
        self._secret = secret

    def command(self, *arguments: str) -> list[str]:
        """The command, without this process's import path: executors must import only the code that
        is sent to them."""
        home = spark_jars().parent
        options = " ".join([*self.java_options, *self.java_files(), f"-Dratchet.folder={self.folder}"])
        environment = [
            "env",
            "-u",
            "PYTHONPATH",
            f"SPARK_HOME={home}",
            "SPARK_LOCAL_IP=127.0.0.1",
            "SPARK_DAEMON_MEMORY=256m",
            f"SPARK_DAEMON_JAVA_OPTS={options}",
            f"JAVA_HOME={Path(self.host.java()).resolve().parent.parent}",
        ]
        settings = "spark.port.maxRetries 0\n"  # otherwise Spark takes the next port, where nobody looks for it
        settings += "spark.master.rest.enabled false\n"  # it asks for no secret, and runs what it gets
        # The pages are open to every user of the host.
        settings += "spark.ui.killEnabled false\nspark.master.ui.decommission.allow.mode DENY\n"
        if self._secret:
            settings += f"spark.authenticate true\nspark.authenticate.secret {self._secret}\n"
        properties = self.write("spark.conf", settings, secret=True)
        if port_taken(self.page_port):
            self.page_port = free_port()
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.page_port)]
        where += ["--properties-file", str(properties)]
        return [*environment, str(home / "bin" / "spark-class"), self.main, *where, *arguments]

    def page(self) -> dict[str, Any] | None:
        """The content of its status page; None while it does not answer."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.page_port}/json/", timeout=_ANSWER_TIMEOUT_S
            ) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return None

    def is_ready(self) -> bool:
        return self.page() is not None


class SparkMaster(_SparkProcess):
    """The master: it assigns the workers' cores."""

    name = "spark-master"
    main = "org.apache.spark.deploy.master.Master"

    def prepare(self) -> list[str]:
        return self.command()

    @property
    def secret(self) -> str:
        """The secret with which the processes of the cluster and its drivers authenticate each
        other; empty if they do not.
        """
        return self._secret

    def alive_workers(self) -> set[int]:
        """The ports of the workers that it reports as alive."""
        page = self.page() or {}
        return {worker["port"] for worker in page.get("workers", ()) if worker["state"] == "ALIVE"}


class SparkWorker(_SparkProcess):
    """Starts executors, one per application."""

    name = "spark-worker"
    main = "org.apache.spark.deploy.worker.Worker"

    def __init__(self, folder: Path, master: SparkMaster, *, cores: int, memory: str, guarded: bool = True) -> None:
        super().__init__(folder, secret=master.secret, guarded=guarded)
        self._master = master
        self._cores, self._memory = cores, memory

    def prepare(self) -> list[str]:
        work = self.folder / "work"  # with the output of executors, and the code that they fetch
        work.mkdir(mode=0o700, exist_ok=True)
        return self.command(
            *("--cores", str(self._cores), "--memory", self._memory, "--work-dir", str(work)),
            f"spark://{self._master.address}",
        )

    def is_ready(self) -> bool:
        """Whether the master reports the worker as alive."""
        return self.port in self._master.alive_workers()

    def executors(self) -> list[int]:
        """The pids of its running executors."""
        pid = self.pid
        return (
            [each for each in descendants(pid) if "CoarseGrainedExecutorBackend" in _command(each)]
            if pid is not None
            else []
        )


class SparkCluster:
    """A master and ``workers`` workers in ``folder``, which authenticate every connection.
    ``settings``: a driver's configuration for the cluster."""

    def __init__(
        self, folder: Path, workers: int = 2, *, cores: int = 1, memory: str = "1g", guarded: bool = True
    ) -> None:
        self.master = SparkMaster(folder / "spark-master", secret=secrets.token_hex(32), guarded=guarded)
        self.workers = [
            SparkWorker(folder / f"spark-worker-{number}", self.master, cores=cores, memory=memory, guarded=guarded)
            for number in range(1, workers + 1)
        ]

    @property
    def address(self) -> str:
        return f"spark://{self.master.address}"

    @property
    def settings(self) -> dict[str, str]:
        """``spark.master`` and ``spark.authenticate.secret``."""
        return {"spark.master": self.address, "spark.authenticate.secret": self.master.secret}

    @property
    def all(self) -> list[Server]:
        return [self.master, *self.workers]

    def start(self) -> None:
        """Start the master, then the workers, and wait until the master reports each as alive. If
        it raises ``ServerError``, none is left running."""
        self.master.start()
        try:
            start_together(self.workers)
        except BaseException:
            self.master.stop()
            raise

    def stop(self) -> None:
        stop_all(self.workers)
        self.master.stop()

    def executors(self) -> list[int]:
        """The pids of all running executors."""
        return [pid for worker in self.workers for pid in worker.executors()]

    def python_workers(self) -> list[int]:
        """The pids of the executors' Python workers, without their daemons."""
        return python_workers(self.executors())

    def await_executors(self, count: int, timeout_s: float = _REGISTER_TIMEOUT_S) -> list[int]:
        """Wait until at least ``count`` executors run. Returns their pids."""
        wait_until(lambda: len(self.executors()) >= count, timeout_s, f"the start of {count} executors")
        return self.executors()

    def __enter__(self) -> SparkCluster:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def python_workers(parents: Sequence[int]) -> list[int]:
    """The pids of the Python workers, without their daemons. ``parents``: pids of executors, or of
    drivers with a local master."""
    daemons = [pid for parent in parents for pid in descendants(parent) if _DAEMON.search(_command(pid))]
    return [pid for pid in daemons if any(pid in descendants(other) for other in daemons if other != pid)]


def descendants(pid: int) -> list[int]:
    """The pids of the children of a process on this machine, of their children, and so on."""
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
        threads = [path.name for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid)]
    except OSError:
        return []
    for thread in threads:  # a JVM may start processes from any of its threads
        try:
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
        except OSError:
            continue
    return children + [below for child in children for below in descendants(child)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
