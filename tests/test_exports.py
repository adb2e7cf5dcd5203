"""What the packages export, and that importing them stays light."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib

import pytest

import ratchet
from tests.kit.processes import ROOT

#: Each has one list of what it exports, its ``__all__``; ``ratchet`` has those of its ``PACKAGES``.
EXPORTING = [
    *ratchet.PACKAGES,
    "framework.acking",
    "framework.transactions",
    "framework.testing.conformance",
    "integration",
]


@pytest.mark.parametrize("package", EXPORTING)
def test_all_names_that_are_exported_exist_and_are_in_order(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert all(hasattr(module, name) for name in module.__all__)


def test_a_name_means_the_same_in_every_package_and_in_ratchet() -> None:
    for package in map(importlib.import_module, ratchet.PACKAGES):
        for name in package.__all__:
            assert getattr(package, name) is getattr(ratchet, name), f"{package.__name__}.{name}"
    with pytest.raises(AttributeError, match="module 'ratchet' has no attribute 'Feilds'"):
        ratchet.Feilds  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_packages_in_which_ratchet_looks_names_up() -> None:
    tree = ast.parse((ROOT / "ratchet/__init__.py").read_text())
    starred = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    assert sorted(filter(None, starred)) == sorted(ratchet.PACKAGES)


def test_importing_ratchet_loads_nothing_before_a_name_is_used() -> None:
    code = (
        "import sys, ratchet; ours = ('framework', 'spouts', 'sinks'); assert not {*ours} & set(sys.modules);"
        "from ratchet import Fields; print({*ours} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "{'framework'}"


def test_pages_examples_and_new_projects_import_from_ratchet_what_it_has() -> None:
    old = re.compile(rf"^from (?:{'|'.join(map(re.escape, ratchet.PACKAGES))}) import", re.MULTILINE)
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    texts += (ROOT / "framework/commands/project").glob("*.txt")
    assert len(texts) > 50
    assert [str(each) for each in texts if "adr" not in each.parts and old.search(each.read_text())] == []


def test_importing_the_packages_loads_neither_spark_nor_pandas() -> None:
    code = "import sys, framework, spouts, sinks; print({'pyspark', 'pandas', 'pyarrow.dataset'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("package", ["framework", "integration", "ratchet", "sinks", "spouts"])
def test_type_checkers_take_the_types_of_an_installed_package(package: str) -> None:
    """They look for the marker of PEP 561, which goes into the wheel."""
    assert (ROOT / package / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"][package]
