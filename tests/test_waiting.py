"""No test fails because something was slow: what must come is waited for with ``PATIENCE_S``."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import starving
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S, wait_for

WAITS = {
    *(
        "wait",
        "join",
        "result",
        "acquire",
        "communicate",
        "settimeout",
    ),
    *("wait_for", "wait_until", "wait_until_idle", "wait_until_caught_up", "flush", "arrived"),
    *("init_transactions", "commit_transaction", "abort_transaction"),
}
#: The same, with the limit by name or after the first argument.
LIMITED = {
    *("wait_for_commit", "urlopen", "create_connection", "HTTPConnection", "list_topics"),
    *("connect", "lead", "_answer", "WorkerClient"),
}
LIMITS = {
    *("timeout", "timeout_s", "connect_timeout_s", "operation_timeout", "request_timeout"),
    *("within_s", "answer_s", "seconds"),
}
#: What is shorter is the period of a loop, or is meant to pass without an answer.
SHORT_S, MINUTE_S = 1.0, 60.0


def named(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_short(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Constant) and type(node.value) in (int, float) and SHORT_S <= node.value < MINUTE_S  # type: ignore[operator]
    )


def short_waits(tree: ast.AST) -> Iterator[int]:
    """The lines with a literal limit under a minute: of a call that waits, in a sum
    with the clock, or as the default of a parameter.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and named(node) in WAITS | LIMITED:
            limits = [each.value for each in node.keywords if each.arg in LIMITS]
            if any(map(is_short, [*(node.args if named(node) in WAITS else node.args[1:]), *limits])):
                yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and named(node.left) == "monotonic":
            if isinstance(node.op, ast.Add) and is_short(node.right):
                yield node.lineno
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            defaults = [*zip(reversed(positional), reversed(node.defaults), strict=False)]
            for parameter, default in [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                if parameter.arg in LIMITS and is_short(default):
                    yield parameter.lineno


def test_no_test_waits_less_than_a_minute_for_what_must_come() -> None:
    files = [
        each for each in (ROOT / "tests").rglob("*.py") if not each.is_relative_to(ROOT / "tests" / "kept" / "0.1")
    ]
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in short_waits(ast.parse(path.read_text()))]
    assert found == [], (
        "wait PATIENCE_S for what must come, and name a limit that is meant to pass (tests/kit/waiting.py)"
    )


def test_no_test_takes_the_check_of_slow_examples_back() -> None:
    """A list of its own replaces that of ``tests/conftest.py``."""
    names = ["conftest.py", Path(__file__).name]
    files = [each for each in (ROOT / "tests").rglob("*.py") if each.name not in names]
    assert [each.name for each in files if "suppress_health_check" in each.read_text()] == []


@pytest.mark.parametrize(
    ("code", "short"),
    [
        ("done.wait(30)", True),
        ("done.wait(timeout=5.0)", True),
        ("wait_for(lambda: x, 20, what='y')", True),
        ("end = time.monotonic() + 10", True),
        ("def gone(pid, seconds=10): ...", True),
        ("def gone(pid, *, within_s: float = 10.0): ...", True),
        ("done.wait(60)", False),
        ("done.wait(PATIENCE_S)", False),
        ("producer.commit_transaction(30)", True),
        ("store.lead('words', 'test', 10)", True),
        ("def courier(worker, answer_s=30.0): ...", True),
        ("while not done.wait(0.1): ...", False),
        ("left = end - time.monotonic()", False),
        ("def step(times=10): ...", False),
    ],
)
def test_short_waits_are_found(code: str, short: bool) -> None:
    assert bool(list(short_waits(ast.parse(code)))) == short


def test_starved_processes_are_stopped_one_after_the_other_and_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starving, "STOPPED_S", 0.05)
    monkeypatch.setattr(starving, "PAUSE_S", (0.0, 0.01))
    sleeps = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    stopping = starving.Stopping(os.getpid(), random.Random(1))
    stopping.start()
    wait_for(lambda: len(stopping.stopped) > 5)
    stopping.end()
    for each in sleeps:
        each.communicate(b"\n", timeout=PATIENCE_S)
        assert each.returncode == 0
