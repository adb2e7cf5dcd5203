"""Runs ``python -m MODULE WORDS`` in this process, which saves the start of an interpreter.

A few tests start real processes all the same: one for each way in, and those that need a signal or
a fresh import.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import structlog

from tests.kit.processes import ROOT


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def call(module: str, *words: str, cwd: Path = ROOT) -> Answer:
    """Run ``python -m MODULE WORDS`` in ``cwd``.

    An exception that the command does not catch is raised here.
    """
    out, err = io.StringIO(), CommandErrors(sys.stderr)
    status: object = 0
    with _as_a_new_process(module, words, cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
    assert isinstance(status, int), status
    return Answer(status, out.getvalue(), err.getvalue())


class CommandErrors(io.StringIO):
    """The standard error of a command.

    Threads that lived before it, such as the reader of the output of a Spark that tests share,
    write to the stream of the tests.
    """

    def __init__(self, tests: TextIO) -> None:
        super().__init__()
        self._tests = tests
        self._earlier_threads = set(threading.enumerate()) - {threading.current_thread()}

    def write(self, text: str) -> int:
        if threading.current_thread() in self._earlier_threads:
            return self._tests.write(text)
        return super().write(text)


@contextlib.contextmanager
def _as_a_new_process(module: str, words: tuple[str, ...], cwd: Path) -> Iterator[None]:
    """Restore the arguments, the folder, the import path,
    the logs and the user's modules afterwards.
    """
    argv, folder, path, modules = sys.argv, os.getcwd(), list(sys.path), set(sys.modules)
    logs, level, environment = structlog.get_config(), logging.getLogger().level, dict(os.environ)
    sys.argv = [module, *words]
    os.chdir(cwd)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
            yield
    finally:
        sys.argv = argv
        os.chdir(folder)
        sys.path[:] = path
        structlog.configure(**logs)
        # not cleared: other threads read it meanwhile
        for key in os.environ.keys() - environment.keys():
            del os.environ[key]
        os.environ.update(environment)
        logging.getLogger().setLevel(level)
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if cwd != ROOT and file is not None and Path(file).is_relative_to(cwd):
                del sys.modules[name]
