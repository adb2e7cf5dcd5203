"""The shape that most fault tests have: a driver under a feed, struck so many times, exact at the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from integration import TcpProxy
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.processes import RunProcess
from tests.kit.stores import Feed, wait_for


def strike(
    job: Job,
    faults: Faults,
    kind: str,
    cause: Callable[[], object],
    *,
    times: int = 1,
    chance: random.Random | None = None,
    pause_s: float = 0.05,
) -> RunProcess:
    """Start a driver, let ``cause`` happen ``times`` times and wait each time until it makes progress again; then all figures are
    compared. ``chance``: up to half a second goes by before each. ``pause_s``: of the feed. Returns the driver, which has ended."""
    run = job.process()
    with Feed(job.topics.bootstrap_servers, job.name, pause_s=pause_s):
        run.start()
        wait_for(lambda: job.committed() >= 3)
        for _ in range(times):
            if chance is not None:
                time.sleep(chance.uniform(0, 0.5))
            faults.recovery(kind, job.committed, cause)
        run.kill()
    job.finish()
    return run


def lose_a_reply(link: TcpProxy) -> Callable[[], None]:
    """What to do so that the next answer on a link is lost, and no other."""

    def lose() -> None:
        dropped = link.dropped
        link.lose_replies()
        wait_for(lambda: link.dropped > dropped)
        link.heal()

    return lose
