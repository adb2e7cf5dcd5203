"""The programs of ``docs/howto/engines``: six jobs, each in Ratchet and in other engines."""

from __future__ import annotations

import ast
import io
import runpy
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.kit.pages import DOCS

ENGINES = DOCS / "howto" / "engines"
JOBS = ("words", "hours", "paid", "changes", "landing", "once")
#: An engine -> the folders and endings of its programs. Kafka Connect writes the tables of Kafka
#: Streams.
FILES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Ratchet": (("ratchet", "py"),),
    "Flink SQL": (("flink_sql", "sql"),),
    "Quix": (("quix", "py"),),
    "Spark": (("spark", "py"),),
    "Bytewax": (("bytewax", "py"),),
    "Kafka Streams": (("kafka_streams", "java"), ("kafka_connect", "properties")),
}
_LEFT_OUT = {".sql": ("--",), ".java": ("//", "import "), ".properties": ("#",)}
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def programs(engine: str, job: str) -> list[Path]:
    """The files of a job; several where one engine does not do all of it."""
    paths = [ENGINES / folder / f"{job}.{ending}" for folder, ending in FILES[engine]]
    return [each for each in paths if each.exists()]


def pipeline_of(job: str) -> Any:
    """The pipeline of Ratchet's program."""
    (path,) = programs("Ratchet", job)
    return runpy.run_path(str(path))[job]


def lines(path: Path) -> int:
    """The lines that are not blank, a comment, a docstring or part of an import."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len(_lines_of_python(text))
    left_out = _LEFT_OUT[path.suffix]
    return sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith(left_out))


def _lines_of_python(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {row for each in tokens if each.type not in _NO_CODE for row in range(each.start[0], each.end[0] + 1)}
    return held.difference(*(range(each.lineno, (each.end_lineno or 0) + 1) for each in _uncounted(ast.parse(text))))


def _uncounted(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            yield node.body[0]


def table() -> str:
    """The lines of each program, as a table of Markdown whose figures are links to the files."""
    head = f"| job | {' | '.join(FILES)} |\n|---|{'---:|' * len(FILES)}\n"
    return head + "".join(f"| `{job}` | {' | '.join(_linked(each, job) for each in FILES)} |\n" for job in JOBS)


def _linked(engine: str, job: str) -> str:
    return " + ".join(f"[{lines(each)}]({each.relative_to(ENGINES.parent)})" for each in programs(engine, job))
