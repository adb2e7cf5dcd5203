"""A second Python process, like another worker: with other string hashes, so that sets have another
order, and with separate memory."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle

from framework.errors import RatchetError, RetryableError
from framework.execution.plan import ExecutionPlan
from framework.execution.ports import ProcessingJob
from framework.execution.tasks import PlannedTopology
from framework.testing.simulation.clock import TurnCounter
from framework.testing.simulation.external_effects import guarded, install_guard
from framework.testing.simulation.tasks import Processed, RowsTaken, process
from framework.testing.simulation.worker_globals import WorkerMemory
from framework.topology import Topology

_LENGTH = struct.Struct("!Q")
#: 0 switches off Python's own hashes, and is Spark's setting for its workers.
_HASH_SEEDS = ("1", "2")


@dataclass(frozen=True, slots=True)
class _Task:
    """``plan``: pickled; None: that of the previous task."""

    plan: bytes | None
    job: ProcessingJob
    seed: int
    turn: int


class SecondWorker:
    """Another worker process, started on first use. ``failed``: why it cannot be used, or empty."""

    def __init__(self, topology: Topology, conf: dict[str, Any], folder: Path, *, connect: bool) -> None:
        self._opening = topology, conf, folder, connect
        self._process: subprocess.Popen[bytes] | None = None
        self._plan: ExecutionPlan | None = None
        self.failed = ""

    def process(self, plan: ExecutionPlan, job: ProcessingJob, *, seed: int, turn: int) -> Processed | None:
        """Process a batch there, in a memory that has seen no other batch. None if that is
        impossible; ``failed`` says why."""
        if self.failed:
            return None
        try:
            if self._process is None:
                self._start()
            pickled = cloudpickle.dumps(plan) if plan is not self._plan else None
            self._plan = plan
            answer = self._ask(_Task(pickled, job, seed, turn))
        except (OSError, EOFError, pickle.PicklingError, TypeError, AttributeError) as error:
            self.failed = f"{type(error).__name__}: {error}"
            return None
        if isinstance(answer, str):
            self.failed = answer
            return None
        found: Processed = answer
        return found

    def close(self) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.kill()  # it holds no data
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        topology, *others = self._opening
        own = os.environ.get("PYTHONHASHSEED")
        other = next(each for each in _HASH_SEEDS if each != own)
        self._process = subprocess.Popen(
            # -P: another user may own the current folder, and PYTHONPATH has it if this process
            # imports from it
            [sys.executable, "-P", "-c", "from framework.testing.simulation.hash_seed_worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONHASHSEED": other,
                "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
            },
        )
        answer = self._ask((cloudpickle.dumps(topology), *others))
        if answer:
            raise OSError(answer)

    def _ask(self, question: Any) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise OSError("it has not started")
        _send(process.stdin, pickle.dumps(question))
        return pickle.loads(_receive(process.stdout))


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("it has ended")
    length = _LENGTH.unpack(header)[0]
    message = stream.read(length)
    if len(message) < length:
        raise EOFError("it has ended")
    return message


class _Worker:
    def __init__(self, questions: IO[bytes], answers: IO[bytes]) -> None:
        self._questions, self._answers = questions, answers
        install_guard()
        self._conf: dict[str, Any] = {}
        self._folder, self._connect = Path(), False
        self._memory: WorkerMemory | None = None
        self._planned: PlannedTopology | None = None

    def run(self) -> None:
        while True:
            try:
                question = _receive(self._questions)
            except EOFError:
                return
            try:
                answer = pickle.dumps(self._answer(pickle.loads(question)))
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                answer = pickle.dumps(f"{type(error).__name__}: {error}")
            _send(self._answers, answer)

    def _answer(self, question: Any) -> Any:
        if not isinstance(question, _Task):
            topology, self._conf, self._folder, self._connect = question
            self._memory = WorkerMemory(cloudpickle.loads(topology))
            return None
        if self._memory is None:
            raise RetryableError("no topology has come")
        if question.plan is not None:
            self._planned = PlannedTopology(cloudpickle.loads(question.plan), self._conf, RowsTaken())
        if self._planned is None:
            raise RatchetError("no plan has come")
        self._memory.restore()
        turns = TurnCounter(question.seed, list(self._memory.namespaces.values()))
        with turns.turn(question.turn), guarded(self._folder, connect=self._connect):
            return process(self._planned, question.job)


def main() -> None:
    """Answer the requests on standard input. Output of user code is dropped."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _Worker(sys.stdin.buffer, answers).run()
