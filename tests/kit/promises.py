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
    "1.1": "Transactions are numbered 1, 2, 3 and so on, also over restarts; topologies in one ZooKeeper do not affect each other.",
    "1.2": "As many batches as configured are processed concurrently; commits happen one at a time, in txid order.",
    "1.3": "A replayed batch of an idempotent spout has the same tuples, in the same order in each partition.",
    "1.4": "When a batch fails, all later batches fail too; each gets a new attempt, and answers of old attempts are ignored.",
    "1.5": "A `FailedException` replays the batch without limit; any other error that repeats stops the topology and is named.",
    "1.6": "Each batch and task gets a new batch bolt, which finishes once: after its last tuple, or without any.",
    "1.7": "A committer executes in the processing phase and finishes in the commit phase, and so do all components below it.",
    "1.8": "A failed commit repeats its transaction from the start, with both phases.",
    "1.9": "With several streams, joins or diamonds, every subscriber gets the streams of its subscriptions.",
    "1.10": "Groupings route rows as Storm's do; equal fields always reach the same task.",
    "1.11": "Rows sent and rows received are counted on every edge; an attempt in which they differ fails.",
    "1.12": "A phase that lasts longer than the message timeout fails its attempt and is cancelled.",
    "1.13": "The state in ZooKeeper has Storm's layout and operations, and the configured root and access rights.",
    "1.14": "The two examples of Storm's documentation run, and their tables agree with each other whatever fails.",
    "1.15": "A source without records makes no transactions, unless the topology asks for empty ones.",
    "2.1": "There is an idempotent and an opaque Kafka spout; each keeps the guarantee of its kind.",
    "2.2": "A spout names its topics or gives a pattern; it reads new topics and partitions from their beginning.",
    "2.3": "A first start begins at the earliest or latest record or at a time; a later start continues from the last position.",
    "2.4": "Records, bytes and time bound a batch, also behind a huge backlog; small partitions get a fair share of it.",
    "2.5": "Spouts never read records of aborted or open Kafka transactions; holes in the offsets are not losses.",
    "2.6": "Lost records (retention, truncation, another topic) stop the topology, or are counted as a gap.",
    "2.7": "While a partition has no leader, an opaque spout reads the others and returns to it; an idempotent spout waits.",
    "2.8": "Key, value, headers, timestamp, partition and offset of a record can be fields.",
    "2.9": "Codecs decode bytes, text, JSON and Avro, with and without a registry, into typed columns; a null value is no error.",
    "2.10": "A record that cannot be decoded stops the topology, is counted, or becomes a dead letter, as configured.",
    "2.11": "Kafka's security settings reach the client; settings that would break a guarantee are refused.",
    "2.12": "The lag of each partition is known, also while nothing commits.",
    "2.13": "A spout can publish its committed positions as the offsets of a consumer group, for other tools.",
    "3.1": "The value of a row follows from its transaction: a replay skips the row, or starts again from its previous value.",
    "3.2": "Memory, SQLite, PostgreSQL and Redis pass one contract suite, with failures at every step.",
    "3.3": "Stamps on rows and headers refuse a writer that is no longer current.",
    "3.4": "The Kafka sink writes each row once, and the part of each task as a whole; an at-least-once sink requires a flag.",
    "3.5": "Tables of Parquet and Delta Lake files get each transaction once; readers never see files of dead attempts.",
    "3.6": "A backend of your own is a short class, and the contract suite runs on it.",
    "3.7": "The builder accepts and refuses what the table of guarantees in the README says.",
    "4.1": "Spouts open, emit and close as in Storm; an ack or a fail reaches the emitting task, with the message id.",
    "4.2": "A tuple can be anchored to no, one or several other tuples; basic bolts anchor and ack automatically.",
    "4.3": "A tuple counts as processed when its whole tree is, in whatever order the acker receives the reports.",
    "4.4": "A tree belongs to one acker; without ackers, or without a message id, nothing is tracked.",
    "4.5": "A tuple that takes too long fails once; a bolt can restart its timeout.",
    "4.6": "When a task, an acker or a spout dies, no tuple is lost: the spout emits its tuples again.",
    "4.7": "The pending tuples of a spout task are bounded, and so is memory.",
    "4.8": "A bolt can hold tuples over many inputs and ack them later.",
    "4.9": "The Kafka spout commits offsets up to the first record that is not acked, and retries; at-most-once is an option.",
    "5.1": "A stateful bolt gets its last committed state before its first tuple.",
    "5.2": "Memory, Redis, disk or a provider of your own stores the state, separately for each task.",
    "5.3": "Checkpoints flow through the topology at an interval; each bolt takes its own after the same tuples on all inputs.",
    "5.4": "After a crash, the prepared changes are committed or rolled back before the bolt continues.",
    "5.5": "State is exactly-once with a spout that can go back to a position, and at-least-once with any other.",
    "6.1": "One command on a fresh machine starts real servers, runs the demo on real flights, and compares the result.",
    "6.2": "Ctrl-C and `SIGTERM` stop cleanly, a kill loses and duplicates nothing, and the next run continues.",
    "6.3": "The command shows the progress (read, in flight, committed, lag, rate, time left) on a terminal, as lines, or as JSON.",
    "6.4": "A page shows running, waiting and failed transactions to authorized viewers; no driver waits for it.",
}

RULES: dict[str, str] = {
    "C1": "The leader raises a state's header before the tasks of an attempt write, or in their one step; each write checks it.",
    "C2": "A state is marked done before ZooKeeper closes the transaction; a start where they disagree reports which is ahead.",
    "C3": "A new leader raises its epoch before it reads; after a lost answer it reads whether the write took place.",
    "C4": "A backend writes rows only on the condition of header and stamps; a store that cannot is for at-least-once topologies.",
    "C5": "After a replay, rows that only a dead attempt wrote are restored; states that skip require deterministic components.",
    "C6": "Rows store their previous value, and also a skipped update reports it, so that components below can redo their work.",
    "C7": "An opened batch is planned again only when its records are permanently lost, and after every state was rolled back.",
    "C8": "When an opened batch has lost its records and a sink that cannot undo may have written, the topology stops.",
    "C9": "A batch is planned from the end of the current plan of the batch before it.",
    "C10": "Spark repeats no task within an attempt; if it does, the repeated task fails.",
    "C11": "In a replay, commit tasks write the same parts of a batch to Kafka, and recognise each written part by its marker.",
    "C12": "One key has one writer in a transaction, and no write reaches the backend before the commit.",
    "C13": "A committer reaches the commit phase as it was after its last tuple; one that cannot travel is refused with advice.",
    "C14": "A driver steps down only when it meets a higher epoch; late tasks of its own dead attempts are refused without a stop.",
    "C15": "Every plan names every partition ever seen, and the plan of the last committed transaction is kept.",
    "C16": "A range of offsets is complete when the reader's position has passed it, whatever its last offsets contain.",
    "C17": "A fresh start drops only the positions: txids, attempts and epochs continue to rise.",
    "C18": "Timeouts count as failed attempts; where the spout can, it plans a batch smaller that timed out, or was too large.",
    "C19": "The records of closed transactions are bounded; a verification of lost input is unverifiable, never right.",
    "C20": "A dead letter is written once, under the transaction of its batch.",
    "C21": "Only tombstones of closed transactions are removed; null, absent and deleted are three different things.",
    "C22": "A named hash of a key's value selects its task, whatever the representation of the value.",
    "C23": "A state that the tasks of a cluster cannot reach is refused at the start.",
    "C24": "ZooKeeper records a commit before a committer without a header begins it; a dropped plan is removed.",
    "C25": "Headers and markers name topology and incarnation; a header or marker of another one stops every start.",
    "C26": "A kept consumer belongs to a topic and a leader epoch; a kept producer that was fenced is initialised again in place.",
    "C27": "If the store is replaced between the opening and the end of a commit, the attempt is repeated.",
    "C28": "A transaction that a state was opened for with one plan is not opened with another.",
    "C29": "A value takes one form before it is hashed, grouped, merged or compared, and is never rounded on the way.",
    "C30": "Errors of stores stop the topology unless known to be temporary; a repeated attempt shows its cause.",
    "C31": "Rows that a committer emits while it executes reach every subscriber, also in the same task.",
    "C32": "A table of files records how to read it; readers that assume otherwise are refused.",
    "C33": "Names that a store folds, cuts off or reserves are kept unchanged, or refused; two states never share a row.",
    "C34": "The output of a task's round is handed over whole or discarded; no ack leaves before the rows made from its tuple.",
    "C35": "The checkpoint record alone says where exactly-once input begins; a consumer group is only published, and read once.",
    "C36": "Recoveries and rescaling do not count as failures or retries of the pending records.",
    "C37": "A topic that was deleted and created again is lost data for every spout; positions carry the topic's id.",
    "C38": "Time bounds a round; tuples that it does not reach wait for the next round, however slow a bolt is.",
    "C39": "State and windows move with their keys, or are refused; a prepared checkpoint is committed under its own layout.",
    "C40": "Every topology has one driver; processes accept only peers that prove the key, and encrypt between hosts.",
    "C41": "A replay restores a table without previous values: it removes appended rows and restores changed rows.",
    "C42": "A change of columns is additive, and part of the transaction that first needs it; a roll-back leaves the column.",
    "C43": "The watermark after a transaction follows from the previous watermark, the plan and its records, also in a replay.",
    "C44": "Effects of time belong to the one transaction whose watermark passes that time.",
    "C45": "The pace decides when a plan is made and how much it may hold; a missed interval is not made up for.",
    "C48": "A replayed dead letter is applied and ended in one transaction, and keeps the coordinates of its record.",
    "C51": "The plan leaves out a record whose value is refused, with the reason; the record is a dead letter of that transaction.",
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
    """The kind of tests that hold a promise: quick, slow or both; None when no test holds it."""
    slow = {each.slow for each in tests if number in each.numbers[kind]}
    return {(False,): "quick", (True,): "slow", (False, True): "both"}.get(tuple(sorted(slow)))


def page(tests: Iterable[Held]) -> str:
    """The text of ``docs/promises.md``."""
    tests = list(tests)

    def table(kind: str, heads: str, promises: Mapping[str, str]) -> list[str]:
        rows = [f"| {number} | {said} | {target(kind, number, tests)} |" for number, said in promises.items()]
        return ["", f"| # | {heads} | tests |", "|---|---|---|", *rows]

    def told_elsewhere(kind: str) -> str:
        held: dict[str, list[str]] = {}
        for number in PROMISES[kind]:
            held.setdefault(str(target(kind, number, tests)), []).append(number)
        return "; ".join(f"{word}: {', '.join(held[word])}" for word in sorted(held)) + "."

    lines = [
        "# Promises",
        "",
        "Each promise of Ratchet in one sentence, and the tests that hold it: *quick* ones, which `make test` runs, *slow*",
        "ones, which only `make test-all` runs, or *both*. Marks connect a test to its promises: `behaviour`, `rule`,",
        "`fault` and `dies`; the name of a simulator's mutation begins with the rule that it takes out.",
        "`python -m tests.kit.promises` writes this page. `tests/test_promises.py` fails for a promise without a test",
        "and for an outdated page.",
        "",
        "## Behaviour",
    ]
    for section, title in SECTIONS.items():
        lines += ["", f"### {title}"]
        lines += table(
            "behaviour",
            "the behaviour",
            {each: said for each, said in BEHAVIOUR.items() if each.startswith(section + ".")},
        )
    lines += [
        "",
        "## The rules of the protocol",
        "",
        "Exactly-once depends on these rules. Mutations take many of them out of the code, one at a time, and the",
        "[simulator](simulation.md) must detect each. The [glossary](glossary.md) explains the words.",
        *table("rule", "the rule", RULES),
        "",
        "## The faults that Ratchet survives",
        "",
        "[Faults survived](faults.md) names each by its number. Their tests are",
        told_elsewhere("fault"),
        "",
        "## What happens when something dies, in core topologies",
        "",
        "The numbers are lines of the tables in [Guaranteed message",
        "processing](core.md#what-happens-when-something-dies) and [State management](state.md#checkpoints). Their tests are",
        told_elsewhere("dies"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(collected(ROOT)), encoding="utf-8")
