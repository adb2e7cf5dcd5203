"""The table of faults to survive: number -> (fault, expected outcome: OK, WAIT,
STOP or a phrase).
"""

from __future__ import annotations

ROWS: dict[int, tuple[str, str]] = {
    1: ("driver killed at each step boundary", "OK"),
    2: ("driver killed 50 times in a run", "OK"),
    3: ("driver paused past its session, standby leads, then wakes", "the old one writes nothing"),
    4: ("two drivers of one topology started together", "one leads, one stands by"),
    5: ("executor killed mid-batch", "OK"),
    6: ("Python worker killed; out of memory", "OK; bounded retries, then STOP"),
    7: ("zombie task writes late", "refused by the header"),
    8: ("shuffle files and cached blocks lost", "attempt fails, OK"),
    9: ("ZooKeeper restarted around commits", "OK"),
    10: ("ZooKeeper unreachable", "WAIT, no commits meanwhile"),
    11: ("ZooKeeper session expired", "step down, re-elect"),
    12: ("ZooKeeper write applied, reply lost", "own write recognised"),
    13: ("ZooKeeper wiped or rolled back under a live sink", "STOP, not txid 1"),
    14: ("leader broker killed, 3 brokers", "OK"),
    15: ("broker paused; all brokers bounced", "WAIT, OK"),
    16: ("open and aborted producer transactions upstream", "bounded by the last stable offset"),
    17: ("compaction and marker gaps", "OK"),
    18: ("retention passes the start of a plan", "STOP or recorded gap"),
    19: ("topic deleted and recreated", "STOP"),
    20: ("partitions added", "OK, from their start"),
    21: ("PostgreSQL killed during COMMIT; acknowledgement lost", "reconciled, OK"),
    22: ("deadlock, serialization failure, SQLite locked", "retry"),
    23: ("Redis restored to an older snapshot", "STOP on regress"),
    24: ("Redis about to evict", "refused at start-up"),
    25: ("sink A committed, sink B down", "same batch again, A unchanged"),
    26: ("2 of 4 commit tasks done, then crash", "OK"),
    27: ("disk full for spill, for SQLite", "attempt fails, OK after"),
    28: ("bit flips in a znode, a row, a manifest", "STOP naming it"),
    29: ("slow, sliced, reset links", "WAIT, OK"),
    30: ("clock jumps by an hour", "OK"),
    31: ("8 hours' worth of transactions", "memory, threads, descriptors, znodes flat"),
}
