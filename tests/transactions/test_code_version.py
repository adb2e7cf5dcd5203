"""Each attempt says which code made it."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from framework.transactions import MemoryStore
from framework.transactions.code_version import code_digest, lineage_of
from framework.transactions.documents import read_transaction
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from tests.kit.replays import Sums, run, state_at, topology_of

BOLT = """
import mine_helper

class Mine:
    def __init__(self):
        self.helper = mine_helper.Helper()
        self.functions = [mine_helper.twice]
"""
HELPER = """
class Helper:
    pass

def twice(number):
    return number * 2
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Writes the modules ``mine`` and ``mine_helper`` into a folder, and imports them."""

    def write(bolt: str = BOLT, helper: str = HELPER, folder: str = "one") -> ModuleType:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        for name, text in (("mine", bolt), ("mine_helper", helper)):
            file = place / f"{name}.py"
            file.write_text(text)
            os.utime(file, ns=(len(text), hash(text) % 10**15))
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "path", [str(place), *sys.path])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        importlib.invalidate_caches()
        return importlib.import_module("mine")

    yield write
    for name in ("mine", "mine_helper"):
        sys.modules.pop(name, None)


def test_the_code_is_that_of_the_files_which_define_a_component_and_what_it_holds(
    written: Callable[..., ModuleType],
) -> None:
    first = code_digest([written().Mine()])
    assert len(first) == 16
    assert code_digest([written(folder="another").Mine()]) == first  # where it lies does not count
    assert code_digest([written(bolt=BOLT + "# changed\n", folder="2").Mine()]) != first
    assert code_digest([written(helper=HELPER.replace("* 2", "* 3"), folder="3").Mine()]) != first
    assert code_digest([written().Mine(), written().Mine()]) == first


def test_ratchet_itself_is_known_by_its_version() -> None:
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"count": Count()})
    assert code_digest([committer, {}, 7, None]) == ""


def test_each_attempt_is_recorded_with_it(tmp_path: Path) -> None:
    store, built = MemoryStore(), topology_of([["k", 1], ["k", 2]], Sums(state_at(tmp_path)))
    run(built, store)
    record = read_transaction(store, built.id, 2)
    assert record is not None
    made_by = record.attempts[-1].made_by
    assert made_by == lineage_of(built)
    assert made_by["python"] == platform.python_version() and made_by["shape"] == built.digest()
    assert made_by["ratchet"] and made_by["code"]
