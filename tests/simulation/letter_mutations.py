"""What the simulator of dead letters must catch: each mutation takes one rule of C48 or C51 out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from framework.commands import dead_letter_request_submission
from framework.topology import DEAD_LETTER_STREAM, OnStream, dead_letter_replay
from framework.topology.dead_letter_replay import LETTERS_PARTITION, LettersPlanner
from framework.topology.dead_letters import Letter
from framework.topology.spouts import Meta
from framework.transactions.document_writer import TopologyDocuments
from sinks import dead_letter_committers
from sinks.dead_letter_table_reader import TableLetters, letter_of
from tests.simulation.letters import run_letters_schedule
from tests.simulation.mutations import Mutation


def _removes_early(self: LettersPlanner, txid: int, partition: str, meta: Meta) -> Meta:
    """The letters are gone as soon as they are read."""
    found = _real_for_transaction(self, txid, partition, meta)
    if partition == LETTERS_PARTITION and isinstance(self.keeper, TableLetters):
        rows = self.keeper._state.backend._rows().rows  # type: ignore[attr-defined]
        for ref in meta.get("letters", ()):
            rows.pop(tuple(ref), None)
    return found


def _same_count(letter: Letter, error: str) -> dict[str, Any]:
    return {**_real_returned(letter, error), "attempts": letter.attempts}


def _other_place(letter: Letter, error: str) -> dict[str, Any]:
    return {**_real_returned(letter, error), "offset": letter.offset + 1_000}


def _begins_anew(previous: Mapping[str, Meta | None], request: Any) -> int:
    return dead_letter_replay._first(previous)


def _forgets_progress(self: LettersPlanner, previous: Any, plan: Any) -> Any:
    return plan


def _as_it_is(self: TableLetters, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
    """The letters with what attempts at the transaction have written."""
    keys = [tuple(each) for each in refs]
    rows = zip(keys, self._state.backend.multi_get(keys), strict=True)
    return [None if row is None or row.value is None else letter_of(key, row.value) for key, row in rows]


def _keeps_ended(self: Any, entry: Meta) -> Iterator[Any]:
    for each in _real_read(self, entry):
        if isinstance(each, OnStream) and each.stream == DEAD_LETTER_STREAM:
            left = [row for row in each.batch.to_pylist() if row["settled"] is None]
            if left:
                yield OnStream(DEAD_LETTER_STREAM, type(each.batch).from_pylist(left, each.batch.schema))
        else:
            yield each


def _recover_without_letters(self: TopologyDocuments) -> Any:
    recovered, digests = _real_recover(self)
    plans = {
        txid: {
            each: dead_letter_replay._nothing_at(meta, "next") if "letters" in meta else meta
            for each, meta in plan.items()
        }
        for txid, plan in recovered.plans.items()
    }
    return replace(recovered, plans=plans), digests


def _first_txid(letter: Mapping[str, Any], marker: Any) -> Any:
    return _real_record(letter, replace(marker, txid=1))


_real_for_transaction = LettersPlanner.for_transaction
_real_returned = dead_letter_replay._returned
_real_read = dead_letter_replay._LettersReader._letters
_real_recover = TopologyDocuments.recover
_real_record = dead_letter_committers._record
LetterMutation = partial(Mutation, run=run_letters_schedule)

LETTER_MUTATIONS: tuple[Mutation, ...] = (
    LetterMutation("C48: a letter is removed before the commit is opened", [(LettersPlanner, "for_transaction", _removes_early)]),
    LetterMutation("C48: a letter that comes back keeps its count", [(dead_letter_replay, "_returned", _same_count)]),
    LetterMutation("C48: a letter that comes back has other coordinates", [(dead_letter_replay, "_returned", _other_place)]),
    LetterMutation("C48: each plan begins with the first letter of the request", [(dead_letter_replay, "_begin", _begins_anew)]),
    LetterMutation("C48: a plan of the source forgets how many letters are planned",
                   [(LettersPlanner, "_carried", _forgets_progress)]),
    LetterMutation("C48: a letter is read as an earlier attempt has left it", [(TableLetters, "fetched", _as_it_is)]),
    LetterMutation("C48: a replayed letter stays", [(dead_letter_replay._LettersReader, "_letters", _keeps_ended)]),
    LetterMutation("C48: a new leader repeats a plan without its letters",
                   [(TopologyDocuments, "recover", _recover_without_letters)]),
    LetterMutation("C48: a letter comes back under the txid of another transaction",
                   [(dead_letter_committers, "_record", _first_txid)]),
    LetterMutation("C48: an outdated request is planned",
                   [(dead_letter_replay, "is_outdated", lambda request, entry: False)]),
    LetterMutation("C48: letters that came back often are replayed",
                   [(dead_letter_request_submission, "to_replay", lambda letters, attempts_max: list(letters))]),
    LetterMutation("C51: a letter with a refused value is read again", [(dead_letter_replay, "LEFT_OUT", "nothing")]),
)  # fmt: skip
