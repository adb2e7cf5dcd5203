"""Rounds on Spark. Tasks live in homes beside the executors. A round is a Spark job, whose tasks
carry rows to the homes and away from them.

A small round is one Spark task, which asks all homes of a level at once. A large one, on a cluster,
is a chain of levels with shuffles between them, so that no single task carries everything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from framework.core.home_client import Address, HomeClient, HomeSettings, close_home
from framework.core.home_process import ensure_home
from framework.core.plan import CorePlan
from framework.core.rounds import Addressed, HomeLostError, Round, RoundRecord, RoundReport
from framework.errors import InvariantViolation, RetryableError
from framework.execution.channels import Credentials
from framework.execution.spark.rounds import SparkJobs
from framework.observe.logs import get_logger

_log = get_logger()


class SparkRounds:
    """The ``RoundExecutor`` on Spark. ``answer_s``: a home that does not answer for this long is
    ended."""

    def __init__(
        self, plan: CorePlan, settings: Mapping[str, str], *, collapse_tuples_max: int, answer_s: float
    ) -> None:
        self._plan = plan
        self._jobs = SparkJobs(f"ratchet {plan.plan.topology_id}", settings)
        self._collapse_tuples_max = collapse_tuples_max
        self._answer_s = answer_s
        self._settings: HomeSettings | None = None
        self._addresses: list[Address] = []
        self._placed: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._suspect = False
        self._finding = threading.Lock()
        self._tuples = 0

    @property
    def rounds_max(self) -> int:
        """One at a time when rounds are chains: otherwise the tasks of a later round would hold
        slots while they wait for the earlier round, which needs those slots."""
        return 1 if self._chains or self._jobs.slots == 1 else 2

    def start(self) -> None:
        self._jobs.start()
        if self._jobs.local:
            self._settings = HomeSettings.of(self._plan, self._answer_s, None)
        else:
            certificate = self._jobs.new_certificate()
            self._settings = HomeSettings.of(self._plan, self._answer_s, self._jobs.driver_host, certificate)
        tasks = [(level, partition) for level, width in enumerate(self._plan.widths) for partition in range(width)]
        homes = min(self._jobs.slots, len(tasks))
        self._placed = {task: number % homes for number, task in enumerate(tasks)}
        self._names = self._plan.names()
        self._addresses = self._jobs.each(list(range(homes)), _Ensure(self._settings, {}))

    @property
    def _homes(self) -> HomeSettings:
        """The settings of every home. Raises ``InvariantViolation`` before the start."""
        if self._settings is None:
            raise InvariantViolation("a round was begun before Spark was started")
        return self._settings

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        settings = self._homes
        try:
            with self._finding:
                if self._suspect:
                    self._find_homes()
            client = HomeClient(self._addresses, settings.credentials, self._placed, settings.answer_s, self._names)
            if self._chains:
                records = self._jobs.chain(self._plan.widths, _Carry(client, round_))
            else:
                records = self._jobs.one(_Walk(client, round_, self._plan.widths))
        except RetryableError as error:
            self._suspect = True
            if HomeLostError.__name__ in str(error):  # of an error in a Spark task, only the text is left
                raise HomeLostError(str(error)) from error
            raise
        self._tuples = sum(
            counts.emitted for record in records if isinstance(record, RoundReport) for counts in record.counts.values()
        )
        return records

    def wake(self) -> None:
        if self._settings is not None:
            HomeClient(self._addresses, self._settings.credentials, {}, self._settings.answer_s).wake(0)

    def close(self) -> None:
        if self._addresses and self._settings is not None:
            with contextlib.suppress(RetryableError):  # a home that cannot be told to close ends by itself
                self._jobs.each(self._addresses, _Close(self._settings.credentials))
        self._jobs.close()

    @property
    def _chains(self) -> bool:
        """Whether rounds are large, judged by the last one."""
        return not self._jobs.local and self._tuples > self._collapse_tuples_max

    def _find_homes(self) -> None:
        """Find out which homes still answer, and start new ones in place of the others."""
        known = {each.number: each for each in self._addresses}
        found = self._jobs.each(sorted(known), _Ensure(self._homes, known))
        for address in found:
            if address != known[address.number]:
                _log.warning("home.started_anew", home=address.number, pid=address.pid)
        self._addresses = found
        self._suspect = False


@dataclass(frozen=True)
class _Ensure:
    settings: HomeSettings
    known: Mapping[int, Address]

    def __call__(self, number: int) -> Address:
        return ensure_home(self.settings, number, self.known.get(number))


@dataclass(frozen=True)
class _Walk:
    courier: HomeClient
    round_: Round
    widths: Sequence[int]

    def __call__(self) -> list[RoundRecord]:
        return self.courier.walk(self.round_, self.widths)


@dataclass(frozen=True)
class _Carry:
    courier: HomeClient
    round_: Round

    def __call__(self, level: int, partition: int, records: Sequence[RoundRecord]) -> Sequence[Addressed]:
        return self.courier.run_task(self.round_, level, partition, records)


@dataclass(frozen=True)
class _Close:
    credentials: Credentials

    def __call__(self, address: Address) -> None:
        close_home(address, self.credentials)
