"""What most fault tests do: strike a driver several times while it is fed,
and compare all figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from integration import TcpProxy
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.processes import RunProcess
from tests.kit.stores import Feed
from tests.kit.waiting import wait_for


def strike(
    job: Job,
    faults: Faults,
    kind: str,
    cause: Callable[[], object],
    *,
    times: int = 1,
    chance: random.Random | None = None,
    pause_s: float = 0.05,
    ready: Callable[[], bool] | None = None,
) -> RunProcess:
    """Start a driver, and call ``cause`` ``times`` times; wait each time until there is progress
    again.

    Then kill the driver, let another one catch up, and compare all figures. ``chance``: wait up to
    half a second before each ``cause``. ``pause_s``: of the feed. ``ready``: wait for this before
    each ``cause``. Returns the driver, which has ended.
    """
    run = job.process()
    with Feed(job.topics.bootstrap_servers, job.name, pause_s=pause_s):
        run.start()
        wait_for(lambda: job.committed() >= 3)
        for _ in range(times):
            if ready is not None:
                wait_for(ready)
            if chance is not None:
                time.sleep(chance.uniform(0, 0.5))
            faults.recovery(kind, job.committed, cause)
        run.kill()
    job.finish()
    return run


def lose_a_reply(link: TcpProxy) -> Callable[[], None]:
    """A function that loses the next answer on a link, and no other."""

    def lose() -> None:
        dropped = link.dropped
        link.lose_replies()
        wait_for(lambda: link.dropped > dropped)
        link.heal()

    return lose
