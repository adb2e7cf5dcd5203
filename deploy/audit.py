"""Known vulnerabilities of the locked dependencies (``make audit``).

Prints one line for each vulnerability, and one for each dependency that cannot be checked.

Python: the package index has the advisories of each version. Some mirrors answer for the newest
version only. Rust: ``cargo audit``, with the database of ``--rustsec`` or one that it fetches. The
packages of Debian in the image and Spark's jars are not looked up.

Exit status: 1, something is vulnerable; 2, something cannot be checked; 0, neither.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements.lock", "deploy/image/requirements.lock", "requirements-wheels.lock")
CARGO_LOCK = "spouts/native/Cargo.lock"
_ANSWER_S = 60.0
_CONNECTIONS = 8

#: The document at a path of the index, None where there is none.
Index = Callable[[str], Any]


class NotChecked(Exception):
    """Nothing is known about a dependency; the message says why."""


def locked(text: str) -> set[tuple[str, str]]:
    """The names and versions of a lock file."""
    return set(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", text, re.MULTILINE))


def advisories(index: Index, name: str, version: str) -> list[str]:
    """A line per vulnerability of a version. Raises ``NotChecked``."""
    document = index(f"{name}/{version}/json")
    if document is None:
        document = index(f"{name}/json")
        if document is None:
            raise NotChecked("the index does not know it")
        newest = document["info"]["version"]
        if newest != version:
            raise NotChecked(f"the index tells the advisories of the newest version, {newest}, only")
    return [_line(each) for each in document["vulnerabilities"] if not each.get("withdrawn")]


def _line(found: Mapping[str, Any]) -> str:
    names = ", ".join([found["id"], *found.get("aliases", ())])
    return f"{names}; mended in {', '.join(found.get('fixed_in') or ['no version'])}"


def crates(output: str) -> list[str]:
    """A line per vulnerability in what ``cargo audit --json`` prints. Raises ``NotChecked``."""
    try:
        found = json.loads(output)["vulnerabilities"]["list"]
    except (ValueError, KeyError, TypeError):
        raise NotChecked("cargo audit did not report") from None
    return [
        f"{each['package']['name']} {each['package']['version']}: {each['advisory']['id']}; "
        f"mended in {', '.join(each['versions']['patched']) or 'no version'}"
        for each in found
    ]


def audit(
    index: Index, dependencies: Iterable[tuple[str, str]], cargo: Callable[[], str]
) -> Iterator[tuple[bool, str]]:
    """What is wrong, in order: whether it is a vulnerability, and the line about it."""

    def checked(dependency: tuple[str, str]) -> list[tuple[bool, str]]:
        title = " ".join(dependency)
        try:
            return [(True, f"{title}: {line}") for line in advisories(index, *dependency)]
        except NotChecked as error:
            return [(False, f"{title}: not checked: {error}")]

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        for found in threads.map(checked, sorted(dependencies)):
            yield from found
    try:
        yield from ((True, line) for line in crates(cargo()))
    except NotChecked as error:
        yield False, f"{CARGO_LOCK}: not checked: {error}"


def _index() -> Index:
    from pip._internal.models.index import PyPI

    def ask(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{PyPI.pypi_url}/{path}", timeout=_ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise NotChecked(f"the index answered {error.code}") from error
        except (OSError, ValueError) as error:
            raise NotChecked(f"the index does not answer: {error}") from error

    return ask


def _cargo(database: str | None) -> str:
    command = ["cargo", "audit", "--json", "--file", str(ROOT / CARGO_LOCK)]
    command += ["--no-fetch", "--db", database] if database else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotChecked(f"cargo: {error}") from error
    if not done.stdout:
        lines = done.stderr.strip().splitlines()
        raise NotChecked(f"cargo audit: {lines[-1].strip() if lines else 'no output'}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rustsec", help="a clone of RustSec's advisory database")
    parser.add_argument("--allow-unchecked", action="store_true", help="fail for vulnerabilities only")
    options = parser.parse_args()
    dependencies = set().union(*(locked((ROOT / lock).read_text()) for lock in LOCKS))
    found = list(audit(_index(), dependencies, lambda: _cargo(options.rustsec)))
    for _, line in found:
        print(line)
    vulnerable, unchecked = (sum(each is wanted for each, _ in found) for wanted in (True, False))
    print(
        f"{len(dependencies)} Python packages and {CARGO_LOCK}: {vulnerable} vulnerabilities, {unchecked} not checked"
    )
    if vulnerable:
        return 1
    return 2 if unchecked and not options.allow_unchecked else 0


if __name__ == "__main__":
    sys.exit(main())
