"""The ledger of two spouts, two bolts and two ackers, step by step, with ids of four bits.

Bolt 1 makes one tuple, ``tid1``, from one tuple of each spout, so ``tid1`` belongs to both trees.
Each printed line shows a message to an acker, and the ledger value of the tree after it. A tree is
complete when its value is 0.

    python -m examples.acker_trace

Source: *Understanding Storm's guaranteed message processing*, the example of a topology with two
ackers.
"""

from __future__ import annotations

from collections.abc import Iterator

from framework.acking import Acker

STID1, STID2, TID1 = 0b1010, 0b1011, 0b1100
NAMES = {STID1: "stid1", STID2: "stid2", TID1: "tid1"}


class Ledger:
    """Two ackers. The id of a root, modulo two, gives its acker."""

    def __init__(self) -> None:
        self.completed: list[tuple[int, str]] = []
        self.ackers = [Acker[int, str](self._complete, self._complete) for _ in range(2)]

    def emitted_by_spout(self, root: int, spout: str) -> str:
        self._of(root).init(root, spout, root)
        return self._line(root, f"[{NAMES[root]}, {spout}]", f"{spout} emits {NAMES[root]}")

    def emitted_by_bolt(self, root: int, edge: int) -> str:
        return self._told(root, edge, f"bolt1 emits {NAMES[edge]}, anchored to {NAMES[root]}")

    def acked(self, root: int, edge: int, bolt: str) -> str:
        return self._told(root, edge, f"{bolt} acks {NAMES[edge]}")

    def _told(self, root: int, edge: int, what: str) -> str:
        self._of(root).ack(root, edge)
        return self._line(root, f"[{NAMES[root]}, {NAMES[edge]}]", what)

    def _line(self, root: int, message: str, what: str) -> str:
        value = self._of(root).value(root)
        after = f"{value:04b}" if value is not None else "0000, complete"
        return f"{what:44} acker {root % 2 + 1} hears {message:15} {NAMES[root]}: {after}"

    def _of(self, root: int) -> Acker[int, str]:
        return self.ackers[root % 2]

    def _complete(self, root: int, spout: str) -> None:
        self.completed.append((root, spout))


def trace() -> Iterator[str]:
    """The lines of the trace, one per message to an acker, and then one per completed tree."""
    ledger = Ledger()
    yield ledger.emitted_by_spout(STID1, "sid1")
    yield ledger.emitted_by_spout(STID2, "sid2")
    for root in (STID1, STID2):
        yield ledger.emitted_by_bolt(root, TID1)
    for root in (STID1, STID2):
        yield ledger.acked(root, root, "bolt1")
    for root in (STID1, STID2):
        yield ledger.acked(root, TID1, "bolt2")
    for root, spout in ledger.completed:
        yield f"{spout} is told that {NAMES[root]} is fully processed"


def main() -> None:
    for line in trace():
        print(line)


if __name__ == "__main__":
    main()
