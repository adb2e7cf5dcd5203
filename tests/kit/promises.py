"""What Ratchet promises, and where each promise is tested.

There are four kinds: how it behaves, the rules of its protocol, the faults that it survives, and
what happens when a part of a core topology dies. A test names the promises that it holds:
``@pytest.mark.behaviour("1.4")``, ``@pytest.mark.rule("C5")``, ``@pytest.mark.fault(7)``,
``@pytest.mark.dies("state 2")``.

To promise more, add a line here (for ``dies``: to the table of its page), mark the test that fails
without it, and run ``python -m tests.kit.promises``, which writes ``docs/promises.md`` again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.kit.fault_rows import ROWS
from tests.kit.marks import KINDS, Held, collected

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "promises.md"

SECTIONS: dict[str, str] = {
    "1": "Transactional topologies",
    "2": "Kafka spouts",
    "3": "Sinks",
    "4": "Guaranteed message processing",
    "5": "State management",
    "6": "Running it",
}
BEHAVIOUR: dict[str, str] = {
    "1.1": "Transactions are numbered 1, 2, 3 and so on, over restarts too; topologies in one ZooKeeper do not meet.",
    "1.2": "As many batches as configured are processed side by side; commits happen one at a time, in the order of the numbers.",
    "1.3": "A batch of an idempotent spout that is replayed has the same tuples, in the same order in each partition.",
    "1.4": "A batch that fails takes all later ones with it; each comes again as a new attempt, and old answers are ignored.",
    "1.5": "A `FailedException` replays the batch without limit; another error, if it repeats, stops the topology and is named.",
    "1.6": "A batch bolt is a new object for each batch and task, and finishes once, after its last tuple, or without any.",
    "1.7": "A committer executes while its batch is processed and finishes in the commit phase, and all below it do too.",
    "1.8": "A commit that fails is tried again from the start of its transaction, both phases of it.",
    "1.9": "Several streams, joins of several components, diamonds: every subscriber gets what it subscribed to.",
    "1.10": "Groupings bring rows where Storm's would; equal fields always meet in one task.",
    "1.11": "Rows sent and rows received are counted on every edge; an attempt in which they differ fails.",
    "1.12": "A phase that lasts longer than the message timeout fails its attempt and is cancelled.",
    "1.13": "The state in ZooKeeper has Storm's layout and operations, and the configured root and access rights.",
    "1.14": "The two examples of Storm's documentation run, and their tables agree with each other whatever fails.",
    "1.15": "A source without records makes no transactions, unless empty ones are asked for.",
    "2.1": "There is an idempotent and an opaque Kafka spout; each does what its kind promises.",
    "2.2": "Topics are named or match a pattern; topics and partitions that are added are read from their beginning.",
    "2.3": "A first start begins at the earliest or latest record or at a time; a later one goes on where the last one stopped.",
    "2.4": "A batch is limited by records, bytes and time, also behind a huge backlog, and fair to small partitions.",
    "2.5": "Records of aborted Kafka transactions are never read, nor those of open ones; holes in the offsets are not losses.",
    "2.6": "Records that are gone (retention, truncation, another topic) stop the topology or are counted as a gap.",
    "2.7": "An opaque spout goes on without a partition that has no leader and returns to it; an idempotent one waits.",
    "2.8": "Key, value, headers, timestamp, partition and offset of a record can be fields.",
    "2.9": "Bytes, text, JSON and Avro, with and without a registry, are decoded into typed columns; a null value is no error.",
    "2.10": "A record that cannot be decoded stops the topology, is counted, or becomes a dead letter, as asked.",
    "2.11": "Kafka's security settings are passed on; settings that would break a guarantee are refused.",
    "2.12": "The lag of each partition is known, also while nothing is committed.",
    "2.13": "Committed positions can be published as a group's offsets, for other tools.",
    "3.1": "The value of a row follows from its transaction: a replay is skipped or starts again from the value before.",
    "3.2": "Memory, SQLite, PostgreSQL and Redis pass one contract suite, with failures at every step.",
    "3.3": "A writer that is no longer current is refused by what is stamped on rows and headers.",
    "3.4": "The Kafka sink writes each row once, in whole parts; a plain one that may repeat must be asked for.",
    "3.5": "Tables of Parquet and Delta Lake files get each transaction once; what dead attempts leave is never read.",
    "3.6": "A backend of one's own is a short class, and its author can run the contract suite on it.",
    "3.7": "The table of guarantees in the README is what the builder accepts and refuses.",
    "4.1": "Spouts open, emit and close as in Storm; an ack or a fail reaches the task that emitted, with its message id.",
    "4.2": "Tuples are anchored to none, one or several others; basic bolts anchor and ack by themselves.",
    "4.3": "A tuple counts as processed when its whole tree is, in whatever order the acker hears of it.",
    "4.4": "A tree belongs to one acker; without ackers, or without a message id, nothing is tracked.",
    "4.5": "A tuple that takes too long fails once; its time can be begun anew.",
    "4.6": "A task, an acker or a spout that dies loses no tuple: its tuples come again.",
    "4.7": "What a spout task has under way is bounded, and so is memory.",
    "4.8": "A bolt may keep tuples over many inputs and ack them later.",
    "4.9": "The Kafka spout commits offsets up to the first that is not acked, and retries; at most once is a choice.",
    "5.1": "A stateful bolt gets the state last committed before its first tuple.",
    "5.2": "State is kept in memory, in Redis, on disk, or by a provider of one's own, apart for each task.",
    "5.3": "Checkpoints flow through the topology at an interval, and each bolt takes its own after the same tuples on all inputs.",
    "5.4": "After a crash, what was prepared is committed or rolled back before the bolt goes on.",
    "5.5": "State is exactly-once where the spout can go back to a position, and at-least-once elsewhere.",
    "6.1": "One command on a fresh machine starts real servers, runs the demo on real flights, and compares the result.",
    "6.2": "Ctrl-C and `SIGTERM` stop cleanly, a kill loses and doubles nothing, and the next run goes on.",
    "6.3": "Progress is shown (read, in flight, committed, lag, rate, time left), on a terminal, as lines, or as JSON.",
    "6.4": "A page shows what runs, what waits and what failed, to those who may see it; no driver waits for it.",
}

RULES: dict[str, str] = {
    "C1": "A state's header is raised before the tasks of an attempt write, or in their one step; each write checks it.",
    "C2": "A state is marked done before ZooKeeper closes the transaction; a start where the two do not fit says which is ahead.",
    "C3": "A new leader raises its epoch before it reads; whether a write whose answer is lost took place is read, never guessed.",
    "C4": "A backend writes rows only on the condition of header and stamps; what cannot is for at-least-once topologies.",
    "C5": "After a replay, rows that only a dead attempt wrote are put back; states that skip need deterministic components.",
    "C6": "Rows keep their previous value, and an update tells it also when it is skipped, so that what is below can be redone.",
    "C7": "An opened batch is planned anew only when its records are gone for good, and after every state was rolled back.",
    "C8": "Where a sink cannot undo, an opened batch whose records are gone stops the topology.",
    "C9": "A batch is planned from the end of the batch before it, as that one is planned now.",
    "C10": "Spark repeats no task within an attempt; a task that it repeats all the same fails itself.",
    "C11": "The parts of a batch that commit tasks write to Kafka are the same in a replay, and each is recognised by its marker.",
    "C12": "One key has one writer in a transaction, and nothing reaches the backend before the commit.",
    "C13": "A committer travels to the commit phase as it was after its last tuple; one that cannot is refused with advice.",
    "C14": "A driver steps down only when it meets a higher epoch; late tasks of its own dead attempts are refused quietly.",
    "C15": "Every plan names every partition ever seen, and the plan of the last committed transaction is kept.",
    "C16": "A range of offsets is read when the reader's position has passed it, whatever its last offsets hold.",
    "C17": "Starting afresh forgets positions only: transactions, attempts and epochs go on rising.",
    "C18": "Timeouts count as failed attempts, and a batch that timed out is planned smaller where that is allowed.",
    "C19": "What is recorded of closed transactions is bounded, and input that is gone is unverifiable, never right.",
    "C20": "A dead letter is written once, under the transaction of its batch.",
    "C21": "Tombstones are removed only of transactions that are over; null, absent and deleted are three things.",
    "C22": "Which task a key belongs to follows from a named hash of its value, however that value is represented.",
    "C23": "A state that the tasks of a cluster cannot reach is refused at the start.",
    "C24": "What committers without a header are about to begin is written down first; a plan that was dropped is removed.",
    "C25": "Headers and markers name topology and incarnation; what belongs to another one stops every start.",
    "C26": "A kept consumer belongs to a topic and a leader epoch; a kept producer that was taken over begins anew in place.",
    "C27": "Between the opening and the end of a commit a store is the same one, or the attempt is repeated.",
    "C28": "A transaction that a state was opened for with one plan is not opened with another.",
    "C29": "A value has one form before it is hashed, grouped, merged or compared, and is never rounded on the way.",
    "C30": "Errors of stores stop the topology unless they are known to pass; what is repeated shows its cause.",
    "C31": "Rows that a committer emits while it executes reach every subscriber, in the same task too.",
    "C32": "What is needed to read a table of files is in the table; readers that assume otherwise are refused.",
    "C33": "Names that a store folds, cuts off or reserves are kept as they are, or refused; two states never share a row.",
    "C34": "What a task makes in a round is handed over whole or thrown away; no ack leaves before what was made of its tuple.",
    "C35": "Where exactly-once input begins is in the record of checkpoints alone; a consumer group is published, and read once.",
    "C36": "Recoveries and rescaling are no failures of the records under way: no retry is counted for them.",
    "C37": "A topic that was deleted and made again is lost data for every spout; positions carry the topic's id.",
    "C38": "Rounds are bounded by time; what one does not come to is done in the next, whatever a bolt takes for a tuple.",
    "C39": "State and windows move with their keys, or are refused; a prepared checkpoint is finished under its own layout.",
    "C40": "Every topology has one driver; between processes nobody is heard without the key, and hosts talk encrypted.",
    "C41": "A replay finds a table without previous values as it was: appended rows are removed, changed ones put back.",
    "C43": "The watermark after a transaction is a function of the one before, the plan and its records; a replay finds the same.",
    "C44": "What happens because time has passed belongs to the transaction whose watermark passed it, and to no other.",
    "C45": "The pace decides when a plan is made and how much it may hold; an interval that was missed is not made up for.",
    "C48": "A dead letter that is sent again is applied and ended in one transaction, and keeps the coordinates of its record.",
    "C51": "A record whose value is refused is left out by the plan, with its reason, and is a dead letter of that transaction.",
}

FAULTS: dict[str, str] = {str(number): fault for number, (fault, _) in ROWS.items()}
#: The numbered lines of the tables in ``core.md`` and ``state.md``: "page number" -> what happens.
#: What follows from it stands in the same line there.
DIES: dict[str, str] = {
    f"{name} {number}": what
    for name in ("core", "state")
    for number, what in re.findall(
        r"^\| (\d+) \| (.+?) \|", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}
PROMISES: dict[str, dict[str, str]] = dict(zip(KINDS, (BEHAVIOUR, RULES, FAULTS, DIES), strict=True))


def target(kind: str, number: str, tests: Iterable[Held]) -> str | None:
    """The targets that test a promise, for the page; None when no test holds it."""
    slow = {each.slow for each in tests if number in each.numbers[kind]}
    if slow == {False, True}:
        return "`make test`, more in `make test-all`"
    return {frozenset({False}): "`make test`", frozenset({True}): "`make test-all`"}.get(frozenset(slow))


def page(tests: Iterable[Held]) -> str:
    """The text of ``docs/promises.md``."""
    tests = list(tests)

    def table(kind: str, heads: str, promises: Mapping[str, str]) -> list[str]:
        rows = [f"| {number} | {said} | {target(kind, number, tests)} |" for number, said in promises.items()]
        return ["", f"| # | {heads} | tested by |", "|---|---|---|", *rows]

    lines = [
        "# Promises",
        "",
        "What Ratchet promises, one sentence each, and where a test holds it. `make test` runs all but the slow",
        "tests, `make test-all` runs those too. Tests name what they hold by marks: `behaviour`, `rule`, `fault`",
        "and `dies`; mutations of the simulator begin with the rule that they take out.",
        "`tests/test_promises.py` holds that no promise is without a test, and that this page is right. It is",
        "made by `python -m tests.kit.promises`.",
        "",
        "## How it behaves",
    ]
    for section, title in SECTIONS.items():
        lines += ["", f"### {title}"]
        lines += table(
            "behaviour",
            "what it does",
            {each: said for each, said in BEHAVIOUR.items() if each.startswith(section + ".")},
        )
    lines += [
        "",
        "## The rules of the protocol",
        "",
        "What exactly-once rests on. Many are taken out of the code, one at a time, under the",
        "[simulator](simulation.md), which must notice. Words are explained in the [glossary](glossary.md).",
        *table("rule", "the rule", RULES),
        "",
        "## The faults that it survives",
        "",
        "What is expected of each, how often it was injected, and how long recovery took: [Faults survived](faults.md).",
        *table("fault", "the fault", FAULTS),
        "",
        "## What happens when something dies, in core topologies",
        "",
        "What follows: [Guaranteed message processing](core.md#what-happens-when-something-dies) and, for topologies",
        "with state, [State management](state.md#checkpoints).",
        *table("dies", "what happens", DIES),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(collected(ROOT)), encoding="utf-8")
