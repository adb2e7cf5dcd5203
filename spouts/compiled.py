"""Finds the compiled part of the spouts, ``spouts._native``. It is optional: without it, Python
does the same, slower."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import sys
from functools import cache
from typing import Any

_NAME = "spouts._native"


class NotCompiledError(ImportError):
    """There is no compiled part that this process can use. The message gives the reason."""


@cache
def native() -> Any:
    """The compiled module. Raises ``NotCompiledError``.

    It is also found inside the archive of code that Spark's executors get, from which Python itself
    cannot load compiled modules."""
    try:
        return importlib.import_module(_NAME)
    except ModuleNotFoundError:
        return _from_archive()
    except ImportError as error:
        raise NotCompiledError(f"the compiled part of the spouts does not load: {error}") from error


def _from_archive() -> Any:
    files = importlib.resources.files("spouts")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        inside = files / f"_native{suffix}"
        if not inside.is_file():
            continue
        # after loading, the file may be removed
        with importlib.resources.as_file(inside) as extracted:
            spec = importlib.util.spec_from_file_location(_NAME, extracted)
            if spec is None or spec.loader is None:
                break
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise NotCompiledError(f"the compiled part of the spouts does not load: {error}") from error
            sys.modules[_NAME] = module
            return module
    raise NotCompiledError("the compiled part of the spouts was not built")
