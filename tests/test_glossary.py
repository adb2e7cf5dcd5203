"""The glossary: words that it rules out name nothing in the packages."""

import re

from tests.kit.processes import ROOT

PACKAGES = ("framework", "spouts", "sinks", "integration", "ratchet")
NAMED = re.compile(r"^\s*(?:class|(?:async )?def) (\w+)", re.MULTILINE)
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


def ruled_out() -> set[str]:
    _, _, table = GLOSSARY.partition("| not | but |")
    rows = re.findall(r"^\| ([a-z][a-z, ]*) \| [a-z]", table, re.MULTILINE)
    return {word.strip() for row in rows for word in row.split(",")}


def words_of(name: str) -> set[str]:
    """The words of a name, of either spelling.

    >>> sorted(words_of("_TaskWorker_home"))
    ['home', 'task', 'worker']
    """
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_no_module_class_or_function_carries_a_word_that_the_glossary_rules_out() -> None:
    words = ruled_out()
    assert len(words) >= 7
    assert NAMED.findall("class A:\n    async def b(self): ...\n    def c(): ...") == ["A", "b", "c"]
    found = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        names = [path.stem, *NAMED.findall(path.read_text(encoding="utf-8"))]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if words & words_of(name)]
    assert found == []


def test_a_word_has_one_row() -> None:
    table, _, _ = GLOSSARY.partition("## Words that name nothing here")
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:]
    words = [
        word.strip()
        for row in rows
        for word in re.sub(r"\([^)]*\)", lambda each: each[0].replace(",", ""), row).split(",")
    ]
    assert len(words) > 60
    assert sorted({word for word in words if words.count(word) > 1}) == []
