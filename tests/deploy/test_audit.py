"""``make audit`` names vulnerable locked dependencies, and those that it cannot check."""

from __future__ import annotations

import json
from typing import Any

from deploy import audit
from tests.kit.processes import ROOT

NEWEST = {"info": {"version": "2.0"}, "vulnerabilities": []}
VULNERABLE = {
    "info": {"version": "1.0"},
    "vulnerabilities": [
        {"id": "PYSEC-2026-1", "aliases": ["CVE-2026-1"], "fixed_in": ["1.1", "2.0"], "withdrawn": None},
        {"id": "PYSEC-2026-2", "aliases": [], "fixed_in": [], "withdrawn": None},
        {"id": "PYSEC-2026-3", "aliases": [], "fixed_in": ["3"], "withdrawn": "2026-02-01T00:00:00Z"},
    ],
}
CRATE = {
    "package": {"name": "smallvec", "version": "1.6.0"},
    "advisory": {"id": "RUSTSEC-2021-0003"},
    "versions": {"patched": [">=0.6.14, <1.0.0", ">=1.6.1"]},
}


def found(documents: dict[str, Any], crates: object, *dependencies: tuple[str, str]) -> list[tuple[bool, str]]:
    return list(audit.audit(documents.get, dependencies, lambda: json.dumps(crates)))


def test_a_line_for_each_vulnerability_of_a_locked_version() -> None:
    documents = {"old/1.0/json": VULNERABLE, "new/2.0/json": NEWEST}
    crates = {"vulnerabilities": {"list": [CRATE]}}
    assert found(documents, crates, ("old", "1.0"), ("new", "2.0")) == [
        (True, "old 1.0: PYSEC-2026-1, CVE-2026-1; mended in 1.1, 2.0"),
        (True, "old 1.0: PYSEC-2026-2; mended in no version"),
        (True, "smallvec 1.6.0: RUSTSEC-2021-0003; mended in >=0.6.14, <1.0.0, >=1.6.1"),
    ]


def test_where_the_index_tells_of_the_newest_version_only_another_one_is_not_called_good() -> None:
    documents = {"old/json": NEWEST, "new/json": NEWEST}
    assert found(documents, {}, ("old", "1.0"), ("new", "2.0"), ("own", "1")) == [
        (False, "old 1.0: not checked: the index tells the advisories of the newest version, 2.0, only"),
        (False, "own 1: not checked: the index does not know it"),
        (False, "spouts/native/Cargo.lock: not checked: cargo audit did not report"),
    ]


def test_every_dependency_of_a_lock_file_is_looked_up() -> None:
    for lock in audit.LOCKS:
        text = (ROOT / lock).read_text()
        assert len(audit.locked(text)) == text.count("==") - text.count("python_version ==") > 20, lock
    assert audit.locked(
        "psycopg[binary]==3.2 ; python_version >= '3'\nx==1 \\\n    --hash=sha256:0\n    # via y==2"
    ) == {
        ("psycopg", "3.2"),
        ("x", "1"),
    }
