"""The Spark context of a run, set up for short jobs that Spark must not repeat, and closed to
outsiders.

Spark executes the pickles in its blocks, and serves blocks to every connection. So a context that
this module starts authenticates every connection (``spark.authenticate``); components travel
encrypted (``framework.execution.payload_encryption``); Spark's files are in folders that only this
user may read (ADR 86).
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import secrets
import shlex
import shutil
import signal
import socketserver
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from pyspark import SparkConf, SparkContext, accumulators
from pyspark.java_gateway import launch_gateway

from framework.config import HIDDEN, SPARK_REDACTION, is_secret, is_spark_secret, shown_value
from framework.errors import ConfigError, InvariantViolation, TopologyError
from framework.execution.payload_encryption import KEY_VARIABLE, shared_key
from framework.execution.spark.code_archive import ship_code
from framework.execution.spark.daemon import SAFE_PATH, SAFE_PATH_VARIABLE
from framework.execution.spark.jvm_output import SparkOutput
from framework.local_paths import hold, replaceable_by_others
from framework.observe.allowed_hosts import host_of, is_loopback
from framework.observe.logs import INHERITED, get_logger, without_py4j

_log = get_logger()

PROCESSING_POOL = "ratchet-processing"
COMMIT_POOL = "ratchet-commit"

_POOLS = f"""<?xml version="1.0"?>
<allocations>
  <pool name="{PROCESSING_POOL}"><schedulingMode>FIFO</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
  <pool name="{COMMIT_POOL}"><schedulingMode>FIFO</schedulingMode><weight>1000</weight><minShare>1000</minShare></pool>
</allocations>
"""

#: Defaults that the user may override.
_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.killEnabled": "false",  # whoever can open the pages of Spark could end jobs
    "spark.redaction.regex": SPARK_REDACTION,  # every user of the host can open the pages of Spark
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.python.task.killTimeout": "500ms",  # a cancelled task's worker is killed after this long
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
    "spark.shuffle.compress": "false",  # pieces are compressed already
    "spark.shuffle.spill.compress": "true",
    "spark.cleaner.periodicGC.interval": "5min",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
}
#: With a local master the JVM only schedules and copies. During the first minutes of a run, the
#: optimising compiler would compete with the batches for the cores, and at four batches a second
#: its work would never pay off.
_LOCAL_DEFAULTS = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.python.daemon.module": "framework.execution.spark.daemon",
}
#: Settings that the protocol depends on (C10). The configuration does not accept these from the
#: user.
_FIXED = {
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.speculation": "false",
    "spark.scheduler.mode": "FAIR",
}
#: The addresses at which executors reach the driver, and on which it listens. By default Spark
#: takes an address that the whole network can reach.
_DRIVER_ADDRESSES = ("spark.driver.host", "spark.driver.bindAddress")


#: In this variable, a worker of a standalone cluster gives the secret of the cluster to a driver
#: that it starts, and not in the settings.
_WORKERS_SECRET = "_SPARK_AUTH_SECRET"

#: Options of the driver's JVM, in front of the user's options in the usual setting.
_JVM_OPTIONS = "spark.driver.defaultJavaOptions"
#: The same of the executors' JVMs.
_EXECUTOR_OPTIONS = "spark.executor.defaultJavaOptions"
#: The name prefix of folders that only this user may read.
_PRIVATE = "ratchet-spark-"
#: The length of a folder in which the path of a socket fits: Linux allows 107 bytes, and Spark
#: gives it a name of 42.
_SOCKET_FOLDER_MAX = 64
#: The parent of the folder for sockets if the path of the temporary folder is too long.
_SHORT = "/tmp"
#: The environment variable by which ``spark-submit`` passes the port of its JVM to a Python
#: program.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
#: How long a Python may take to tell its version.
_ANSWER_S = 60
#: The environment variable with further arguments of ``spark-submit``.
_SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
#: Variables that another installation of Spark may have left in the environment.
_INFLUENCES = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", _SUBMIT_ARGUMENTS)
#: The address of a driver with a local master, unless the environment gives another one.
_LOCAL_ADDRESS = "127.0.0.1"
#: The settings that become arguments of the JVM in any case, and the settings that identify it.
_ON_COMMAND_LINE = re.compile(
    r"spark\.(master|app\.name|submit\.deployMode|driver\.(memory\w*|defaultJavaOptions|extra\w+))"
)


class _AccumulatorServer(socketserver.ThreadingMixIn, accumulators.AccumulatorTCPServer):  # type: ignore[misc]
    """The server of a cluster's driver to which its JVM reports accumulators, with a thread per
    connection. PySpark's own serves one connection at a time: if another user of the host connected
    before the JVM and said nothing, no job would end."""

    daemon_threads = True


class Spark:
    """The ``SparkContext`` of a run: either its own, which it starts and stops, or the active one,
    which it leaves running."""

    _started: ClassVar[WeakSet[Spark]] = WeakSet()  # of all runs in this process
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, app_name: str, settings: Mapping[str, str]) -> None:
        self._app_name = app_name
        self._settings = settings
        self._context: SparkContext | None = None
        self._owned = False

    def start(self) -> SparkContext:
        """Start Spark, or use the active context. Raises ``ConfigError`` when Spark does not start,
        and ``TopologyError`` when the active context lacks a setting that Ratchet needs."""
        with Spark._lock:
            self._owned = SparkContext._active_spark_context is None
            self._context = start_context(self._app_name, self._settings)
            Spark._started.add(self)
            return self._context

    @property
    def alone(self) -> bool:
        """Whether the context is this run's own, and no other run of this process uses it."""
        others = [each for each in list(Spark._started) if each is not self]
        return self._owned and not any(each._context is self._context for each in others)

    @property
    def local(self) -> bool:
        """Whether the only executor is in this process's own Spark."""
        master = self.context.master
        return is_local(master) and not master.startswith("local-cluster")

    @property
    def driver_host(self) -> str:
        """The name or address under which executors reach this process."""
        return str(self.context.getConf().get("spark.driver.host", "127.0.0.1"))

    @property
    def bind_address(self) -> str:
        """The address on which this process listens for executors."""
        return str(self.context.getConf().get("spark.driver.bindAddress", self.driver_host))

    @property
    def slots(self) -> int:
        """How many tasks the present executors can run concurrently; at least 1."""
        spark = self.context._jsc.sc()
        return max(int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile())), 1)

    @property
    def active(self) -> SparkContext | None:
        """The context; None before the start and after the end."""
        return self._context

    @property
    def context(self) -> SparkContext:
        """The context. Raises ``InvariantViolation`` before the start and after the end."""
        if self._context is None:
            raise InvariantViolation("Spark is not started, or was stopped")
        return self._context

    def stop(self) -> None:
        """Stop the context, unless it was active before. Safe to call twice. If other runs of this
        process use it, the last of them stops it."""
        if self._context is None:
            return
        with Spark._lock:
            context, self._context = self._context, None
            if context is None:
                return
            Spark._started.discard(self)
            if not self._owned:
                return
            heir = next((each for each in Spark._started if each._context is context), None)
            if heir is not None:
                heir._owned = True
                return
            if _output is not None:
                _output.show(False)  # workers that are ended during work print errors
            context.stop()


def start_context(app_name: str, settings: Mapping[str, str]) -> SparkContext:
    """Start Spark in this process. Raises ``ConfigError``, with one line that gives the reason,
    when it cannot.

    Uses an active context if it has the settings that Ratchet needs. Otherwise raises
    ``TopologyError``, because its settings could break the guarantees.
    """
    without_py4j()
    active = SparkContext._active_spark_context
    if active is not None:
        return _with_code(_with_key(_checked(active)))
    conf = _conf(app_name, settings)
    _warn_of_java_options(conf)
    try:
        accumulators.AccumulatorTCPServer = _AccumulatorServer
        with _own_interrupts():
            context = SparkContext(conf=conf, gateway=_gateway(settings, conf))
        context.setLogLevel(conf.get("spark.log.level", "ERROR") or "ERROR")
    except Exception as error:
        said = f" (what it printed is in {_output.keep_log()})" if _output is not None else ""
        raise ConfigError(
            f"Spark does not start with spark.master={conf.get('spark.master')!r}: {_reason(error)}; check "
            f"that Java 17 or newer is on the PATH and that the master can be reached{_changed_by_environment()}{said}"
        ) from error
    if _output is not None:
        _output.show(True)
    return _with_code(_with_key(context))


def _conf(app_name: str, settings: Mapping[str, str]) -> SparkConf:
    """The settings of a context, and the environment that its processes inherit. Raises
    ``ConfigError`` when outsiders could run code in it."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    shared_key()
    chosen = {**_DEFAULTS, **_submitted(), **settings}
    chosen = {**_authentication(chosen), **chosen}
    if INHERITED in os.environ:
        chosen.setdefault(f"spark.executorEnv.{INHERITED}", os.environ[INHERITED])
    if is_local(chosen["spark.master"]):
        _check_python_of_workers(os.environ["PYSPARK_PYTHON"])
        os.environ["PYTHONPATH"] = os.pathsep.join(_import_path())
        chosen = {**_LOCAL_DEFAULTS, **_imports_of_workers(), **chosen}
        # The host name of a laptop or container may not resolve.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOCAL_ADDRESS)
        chosen["spark.local.dir"] = _private_folders(chosen.get("spark.local.dir"))
        chosen = {**_unix_sockets(), **chosen}
    else:
        chosen[f"spark.executorEnv.{KEY_VARIABLE}"] = shared_key()
    chosen[_JVM_OPTIONS] = _with_temporary_folder(chosen, "driver", _private_folder(tempfile.gettempdir()))
    if chosen["spark.master"].startswith("local-cluster"):
        chosen[_EXECUTOR_OPTIONS] = _with_temporary_folder(chosen, "executor", _private_folder(tempfile.gettempdir()))
    elif chosen["spark.master"].startswith("spark://"):
        # The current folder of an executor is its own. Other clusters name such a folder.
        chosen[_EXECUTOR_OPTIONS] = _with_temporary_folder(chosen, "executor", ".")
    pools = _private_folder(tempfile.gettempdir()) / "pools.xml"
    pools.write_text(_POOLS, encoding="utf-8")
    conf = SparkConf().setAppName(app_name)
    for key, value in {**chosen, **_FIXED, "spark.scheduler.allocation.file": pools.as_uri()}.items():
        conf.set(key, value)
    return conf


@functools.cache
def _check_python_of_workers(named: str) -> None:
    """Raise ``ConfigError`` if local workers would run another Python than this process.
    ``named``: by ``PYSPARK_PYTHON``."""
    if named == sys.executable:
        return
    advice = f"unset PYSPARK_PYTHON, or set it to {sys.executable}"
    asked = [named, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=_ANSWER_S).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"PYSPARK_PYTHON={named!r} is no Python that runs here: {error}; {advice}") from error
    if found != (own := f"{sys.version_info.major}.{sys.version_info.minor}"):
        raise ConfigError(f"PYSPARK_PYTHON={named!r} is Python {found}, and the driver is Python {own}; {advice}")


def _submitted() -> dict[str, str]:
    """The settings that ``spark-submit`` got, if it has started this process: they are in its JVM.
    As in any Spark program, the program's own settings take precedence."""
    if _SUBMITTED not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


#: The output of the only JVM that this process has started for Spark, which outlives a context;
#: None before the start.
_output: SparkOutput | None = None
#: The JVM that ``launch_ahead`` starts, and its settings; None if it was not called.
_ahead: tuple[dict[str, str], Future[Any]] | None = None


def launch_ahead(settings: Mapping[str, str]) -> None:
    """Start the JVM in a background thread, for a later ``start_context`` with the same settings.
    An error is raised there, not here."""
    global _ahead
    if SparkContext._gateway is None and _ahead is None and _SUBMITTED not in os.environ:
        launching: Future[Any] = Future()
        _ahead = dict(settings), launching
        threading.Thread(target=_launch_into, args=(launching, _conf("ratchet", settings)), daemon=True).start()


def _gateway(settings: Mapping[str, str], conf: SparkConf) -> Any:
    """The JVM in which Spark runs, with its output captured; None when there is one already."""
    global _ahead
    if SparkContext._gateway is not None:
        return None
    ahead, _ahead = _ahead, None
    if ahead is not None and ahead[0] == dict(settings):
        return ahead[1].result()
    return _launch(conf)


def _launch(conf: SparkConf) -> Any:
    """Start the JVM. Every user of the host can read its command line, so the line has only the
    settings that a JVM needs before it reads a file. Secret settings are passed later."""
    global _output
    _output = SparkOutput()
    shown, others = SparkConf(loadDefaults=False), {}
    for key, value in conf.getAll():
        if _ON_COMMAND_LINE.fullmatch(key):
            shown.set(key, value)
        elif not is_spark_secret(key):
            others[key] = value
    with _submitted_from_file(others):
        return launch_gateway(shown, _output.popen_arguments())


@contextmanager
def _submitted_from_file(settings: Mapping[str, str]) -> Iterator[None]:
    """Let ``spark-submit`` read settings from a file that only this user can read. All settings are
    in the file, because names do not reveal all secrets: an address may contain one. If the user's
    own arguments name a file, that file is read instead."""
    before = os.environ.get(_SUBMIT_ARGUMENTS)
    if before is not None and "--properties-file" in before:
        yield
        return
    lines = [f"{_property(key)}={_property(value)}\n" for key, value in settings.items()]
    file = _private_folder(tempfile.gettempdir()) / "submit.properties"
    file.touch(mode=0o600)
    file.write_text("".join(lines), encoding="ascii")
    arguments = f"--load-spark-defaults --properties-file {shlex.quote(str(file))}"
    os.environ[_SUBMIT_ARGUMENTS] = f"{arguments} {before or 'pyspark-shell'}"
    try:
        yield
    finally:
        os.environ.pop(_SUBMIT_ARGUMENTS)
        if before is not None:
            os.environ[_SUBMIT_ARGUMENTS] = before
        file.unlink()


def _property(text: str) -> str:
    """A key or value of a Java properties file, with an escape for each character that could be a
    sign."""
    encoded = text.encode("utf-16-be")
    units = [int.from_bytes(encoded[start : start + 2], "big") for start in range(0, len(encoded), 2)]
    return "".join(chr(each) if each < 128 and chr(each).isalnum() else f"\\u{each:04x}" for each in units)


def _warn_of_java_options(conf: SparkConf) -> None:
    """Warn of Java options that seem to contain a secret, because they are on a command line."""
    for key, value in conf.getAll():
        if key.endswith("JavaOptions") and (is_secret(value) or shown_value("", value) == HIDDEN):
            _log.warning(
                "spark.secret_on_command_line",
                setting=key,
                advice="every user of the host can read the options of a JVM: write the secret into a file that the option names",
            )


def _launch_into(launching: Future[Any], conf: SparkConf) -> None:
    try:
        launching.set_result(_launch(conf))
    except BaseException as error:  # noqa: BLE001 - raised again where the JVM is wanted
        launching.set_exception(error)


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep this process's handler of Ctrl-C. PySpark installs its own, which cancels all jobs,
    including a commit under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _with_code(context: SparkContext) -> SparkContext:
    """Ship the modules that this process has imported so far to the executors of a cluster."""
    if not is_local(context.master):
        ship_code(context, _private_folder(tempfile.gettempdir()))
    return context


def is_local(master: str) -> bool:
    """Whether this process starts the executors on this host. Such executors import modules from
    the same paths as this process."""
    return master.startswith("local")


def _changed_by_environment() -> str:
    """The variables that this environment has, and that change how Spark starts."""
    found = [name for name in _INFLUENCES if os.environ.get(name) not in (None, _LOCAL_ADDRESS)]
    return f", and check what the environment says by {', '.join(found)}" if found else ""


def _reason(error: BaseException) -> str:
    """The informative line of a Java stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ") or "Exception: " in line]
    line = (causes or lines or [type(error).__name__])[-1]
    return line.removeprefix("Caused by: ").removeprefix(": ")[:300]


def _authentication(chosen: Mapping[str, str]) -> dict[str, str]:
    """The settings by which Spark refuses connections of outsiders, unless the user has chosen
    otherwise. ``spark.authenticate = false`` is such a choice.

    Raises ``ConfigError`` for a standalone cluster that other hosts can reach, if its secret is not
    given. A cluster on this host's loopback address may do without a secret: then the driver
    listens there too."""
    master = chosen["spark.master"]
    here = master.startswith("spark://") and all(map(_is_loopback, master.removeprefix("spark://").split(",")))
    near = dict.fromkeys(_DRIVER_ADDRESSES, "127.0.0.1") if here else {}
    if chosen.get("spark.authenticate", "true").lower() != "true":
        return near
    on = {"spark.authenticate": "true"}
    if master.startswith("local-cluster"):
        return {**on, "spark.authenticate.secret": secrets.token_hex(32)}
    if is_local(master):
        return on  # Spark draws a secret
    if not master.startswith("spark://") or "spark.authenticate.secret" in chosen:
        return {**on, "spark.network.crypto.enabled": "true"}
    if os.environ.get(_WORKERS_SECRET):
        return {**on, "spark.network.crypto.enabled": "true", "spark.authenticate.secret": os.environ[_WORKERS_SECRET]}
    far = [f"{key} = {chosen[key]}" for key in near if key in chosen and not _is_loopback(chosen[key])]
    if here and not far:
        return {"spark.authenticate": "false", **near}
    raise ConfigError(
        f"{', '.join([master, *far])} is used without authentication, so whoever reaches the ports of the driver or of an "
        "executor can run code there: set spark.authenticate.secret to the secret of the cluster (and "
        "spark.authenticate = true for its master and workers), or set spark.authenticate = false here to do without"
    )


def _is_loopback(address: str) -> bool:
    """Whether a host, optionally with a port, is of this host's loopback interface."""
    return is_loopback(address.strip("[]")) or is_loopback(host_of(address))


def _private_folders(given: str | None) -> str:
    """The value of ``spark.local.dir`` with which no other user can read Spark's files: folders
    inside the given ones, or inside the temporary folder."""
    listed = os.environ.get("SPARK_LOCAL_DIRS")
    folders = [str(_private_folder(each.strip())) for each in (listed or given or tempfile.gettempdir()).split(",")]
    if listed:
        os.environ["SPARK_LOCAL_DIRS"] = ",".join(folders)
    return ",".join(folders)


def _with_temporary_folder(chosen: Mapping[str, str], which: str, folder: Path | str) -> str:
    """The default options of a JVM, with which it unpacks native libraries, such as that of LZ4,
    where no other user can replace them before they are loaded. ``which``: "driver" or
    "executor"."""
    given = chosen.get(f"spark.{which}.defaultJavaOptions", "")
    if "-Djava.io.tmpdir=" in f"{given} {chosen.get(f'spark.{which}.extraJavaOptions', '')}":
        return given
    return f'{given} "-Djava.io.tmpdir={folder}"'.strip()


def _unix_sockets() -> dict[str, str]:
    """Settings with which Spark and its Python processes communicate over Unix sockets. Spark reads
    pickles from these sockets without a secret, so they are in a folder of this user only. The
    hosts of a cluster have no such folder: there Spark uses TCP, and checks its secret."""
    folder = _private_folder(tempfile.gettempdir())
    if len(str(folder)) > _SOCKET_FOLDER_MAX:
        if not os.access(_SHORT, os.W_OK) or replaceable_by_others(Path(_SHORT)) is not None:
            return {}
        folder = _private_folder(_SHORT)
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": str(folder)}


@functools.cache
def _private_folder(parent: str) -> Path:
    """A folder of this process inside ``parent``, readable by its user only; removed when the
    process ends normally. If ``parent`` is such a folder already, it is returned."""
    if re.fullmatch(_PRIVATE + r"\w+", Path(parent).name) and _is_private(Path(parent)):
        return Path(parent)
    Path(parent).mkdir(parents=True, exist_ok=True)
    others = replaceable_by_others(Path(parent))
    if others is not None:
        _log.warning(
            "spark.folder_of_others",
            folder=parent,
            advice=f"another user may replace what is in {others}, and run code as this one: set TMPDIR and spark.local.dir to "
            "folders of this user, or of root with the sticky bit",
        )
    folder = Path(tempfile.mkdtemp(prefix=_PRIVATE, dir=parent))
    hold(folder)  # as long as this process lives
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether a folder exists that only this user may read."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _with_key(context: SparkContext) -> SparkContext:
    """Pass the key to the Python workers of a context. If the user has started the JVM or the
    context, they do not inherit it, so it travels with their tasks."""
    conf, key = context.getConf(), shared_key()
    if is_local(context.master):
        inherited = context._jvm.System.getenv(KEY_VARIABLE)
    else:
        inherited = conf.get(f"spark.executorEnv.{KEY_VARIABLE}", None)
    context.environment.pop(KEY_VARIABLE, None)  # otherwise it would be part of every task
    if inherited != key:
        context.environment[KEY_VARIABLE] = key
    if (conf.get("spark.authenticate", None) or "false").lower() != "true":
        _log.warning(
            "spark.unauthenticated",
            master=context.master,
            advice="whoever reaches the ports of its driver and executors can run code there: set spark.authenticate = true",
        )
    return context


def _import_path() -> list[str]:
    """The paths on which workers on this host must look for the user's modules: those of this
    process, without installed packages. The current folder is included only if this process imports
    from it, too, because another user may own the folder."""
    stdlib = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    own = [entry or os.getcwd() for entry in sys.path]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return list(dict.fromkeys([*filter(None, given), *(each for each in own if _is_users_path(Path(each), stdlib))]))


def _is_users_path(path: Path, stdlib: AbstractSet[Path]) -> bool:
    """Whether a folder of the import path is neither of installed packages nor of Python itself."""
    return (
        path.is_dir()
        and not {"site-packages", "dist-packages"}.intersection(path.parts)
        and stdlib.isdisjoint([path, path.parent])
    )


def _imports_of_workers() -> dict[str, str]:
    """The environment with which Python workers on this host import from the paths of this process
    only. ``python -m``, by which Spark starts them, would look into the current folder first, and
    another user may own that folder. A JVM that somebody else started does not have this process's
    ``PYTHONPATH``."""
    return {
        f"spark.executorEnv.{SAFE_PATH_VARIABLE}": SAFE_PATH,
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }


def _checked(context: SparkContext) -> SparkContext:
    conf = context.getConf()
    for key, value in _FIXED.items():
        if conf.get(key, None) != value:
            raise TopologyError(
                f"a SparkContext is active that has {key}={conf.get(key, None)!r}, and Ratchet needs {value!r}: stop it, "
                "or let submit() start Spark"
            )
    return context
