"""The one import of pipelines: ``from ratchet import Fields, Count, submit``.

A name is imported on first use. So ``import ratchet`` loads no other module, and the client of a
store is loaded only if the store is used. Other packages add sources and sinks by entry points: see
``framework.extensions``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ratchet.console import main as main

if TYPE_CHECKING:  # the packages below, for type checkers
    from framework import *  # noqa: F403
    from framework.errors import *  # noqa: F403
    from framework.state import *  # noqa: F403
    from framework.testing import *  # noqa: F403
    from ratchet.streams import *  # noqa: F403
    from sinks import *  # noqa: F403
    from spouts import *  # noqa: F403

#: The packages that are searched for names, in this order. Each contributes its ``__all__``.
PACKAGES = (
    "framework",
    "framework.errors",
    "framework.state",
    "sinks",
    "spouts",
    "framework.testing",
    "ratchet.streams",
)

if not TYPE_CHECKING:  # otherwise every name would have the type Any

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        if not name.startswith("_"):
            for package in map(import_module, PACKAGES):
                if name in package.__all__:
                    found = globals()[name] = getattr(package, name)
                    return found
            from framework.extensions import SINKS, SOURCES, added

            for group in (SOURCES, SINKS):
                if (found := added(group, name)) is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({name for package in PACKAGES for name in import_module(package).__all__})
