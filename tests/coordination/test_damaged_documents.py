"""Documents in the coordination store that anybody may have written: other topologies are listed as
before, and a driver refuses them or commits exactly once.

``python -m tests.kit.znode_fuzz`` does it for longer.
"""

from __future__ import annotations

import collections

import pytest

from framework.coordination.transactional_state import TransactionalState
from framework.errors import CorruptStateError
from framework.transactions import MemoryStore
from framework.transactions.documents import read_incarnation
from tests.kit.fuzzing import MEMORY_MAX_MB, Counts, memory_mb
from tests.kit.znode_fuzz import fuzz_documents, fuzz_driver, shows_as_it_is

pytestmark = pytest.mark.behaviour("1.13")


@pytest.mark.slow
def test_any_documents_of_a_topology_leave_the_others_listed_and_are_named() -> None:
    counts: Counts = collections.Counter()
    fuzz_documents(0)
    before = memory_mb()
    for seed in range(600):
        print(f"seed {seed}")
        counts += fuzz_documents(seed)
    assert min(counts[each] for each in ("readable", "unreadable", "read", "refused")) > 100, counts
    assert memory_mb() - before < MEMORY_MAX_MB


@pytest.mark.slow
def test_a_driver_over_any_documents_refuses_them_or_commits_exactly_once(seed: int) -> None:
    counts: Counts = collections.Counter()
    for each in [*range(60), *range(seed, seed + 20)]:
        print(f"seed {each}")
        counts += fuzz_driver(each)
    assert min(counts[each] for each in ("exact", "refused")) > 10, counts


@pytest.mark.parametrize(
    "text", ["\0", "a\nerror: forged", "x" * 100_000, 7, ["a"], {}], ids=lambda text: repr(text)[:9]
)
def test_a_text_that_is_no_incarnation_is_refused_and_shown_as_it_is(text: object) -> None:
    store = MemoryStore()
    TransactionalState(store, "words").set_data("incarnation", text)
    with pytest.raises(CorruptStateError, match="words/incarnation: .* is no incarnation") as refused:
        read_incarnation(store, "words")
    assert shows_as_it_is(str(refused.value)) and len(str(refused.value)) < 300
