"""Ships code to executors on other machines: one archive of Ratchet and of the user's modules,
added to the run.

The archive contains Ratchet's own packages, wherever they are, and every module that this process
has imported from outside of its installed packages, with its whole top-level package. Installed
packages are not shipped: they must be installed on the executors' hosts, in the Python that
``PYSPARK_PYTHON`` names there.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from framework.errors import ConfigError

#: Shipped even if they are installed: executors must run the same code as the driver.
OWN_PACKAGES = ("framework", "spouts", "sinks")
#: The demo, which is a program like a user's, and is installed with the packages.
_DEMO = "ratchet"
#: A larger archive contains data that does not belong on every executor.
SHIPPED_BYTES_MAX = 256 << 20
# a fixed date, so that the archive's bytes depend on its content alone
_EPOCH = (1980, 1, 1, 0, 0, 0)


def ship_code(context: Any, folder: Path) -> None:
    """Make the modules that this process has imported available on the executors of a
    ``SparkContext``. ``folder``: only this user may write there, because each executor that starts
    later fetches the archive from there.

    Raises ``ConfigError`` for a file that cannot be read, and when the modules are too large in
    total.
    """
    context.addPyFile(str(make_archive(folder)))


def make_archive(folder: Path) -> Path:
    """Write the archive into ``folder`` and return its path. The name contains a digest of the
    content."""
    files = dict(sorted(_files().items()))
    size = sum(file.stat().st_size for file in files.values())
    if size > SHIPPED_BYTES_MAX:
        largest = max(files, key=lambda name: files[name].stat().st_size)
        raise ConfigError(
            f"the modules to send to Spark's executors have {size >> 20} MB, more than {SHIPPED_BYTES_MAX >> 20}: keep data "
            f"out of packages that are imported ({largest} is the largest file), or install them there"
        )
    digest = hashlib.sha256()
    target = folder / "code.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            try:
                data = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"{file} cannot be sent to Spark's executors: {error.strerror or error}") from error
            digest.update(f"{name} {len(data)} ".encode() + data)
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return target.rename(folder / f"ratchet-code-{digest.hexdigest()[:16]}.zip")


def _files() -> dict[str, Path]:
    """Name in the archive -> file, for all shipped files."""
    found: dict[str, Path] = {}
    for name in sorted({name.partition(".")[0] for name in list(sys.modules)}):
        module = sys.modules.get(name)
        for place in _places(module):
            if name not in (*OWN_PACKAGES, _DEMO) and _is_installed(place):
                continue
            if place.is_dir():
                found |= {str(file.relative_to(place.parent)): file for file in _inside(place)}
            else:
                found[place.name] = place
    return found


def _places(module: ModuleType | None) -> list[Path]:
    """The folders of a package, or the file of a module. Empty for a built-in module and for the
    main program."""
    if module is None or module.__name__ == "__main__":
        return []
    paths = getattr(module, "__path__", None)
    if paths is not None:
        return [Path(path) for path in paths if Path(path).is_dir()]
    file = getattr(module, "__file__", None)
    return [Path(file)] if file is not None and file.endswith(".py") and Path(file).is_file() else []


def _inside(package: Path) -> list[Path]:
    """The files of a package, without compilers' output: such folders have a CACHEDIR.TAG
    (https://bford.info/cachedir)."""
    left = {tag.parent for tag in package.rglob("CACHEDIR.TAG")}
    return [
        file
        for file in package.rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and file.suffix != ".pyc"
        and left.isdisjoint(file.parents)
    ]


def _is_installed(place: Path) -> bool:
    """Whether the place belongs to Python or to an installed package."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    whole = place.resolve()
    return (
        "site-packages" in whole.parts or "dist-packages" in whole.parts or any(root in whole.parents for root in roots)
    )
