"""Fetches the JavaScript libraries of the page again: ``python -m tests.ui.vendor``.

They are files of the wheel, so nothing is built and no request leaves the machine of a viewer.
``npm pack`` brings them; ``VENDORED`` says which files of which package, and ``SHA256SUMS`` beside
them what they are. For another version, change it here, run this, and look at the page.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "framework" / "ui" / "static" / "vendor"
SUMS = FOLDER / "SHA256SUMS"
#: The parts of D3 that compute scales, ticks, areas and stacks; none of them touches the document.
D3 = {
    "d3-array": "3.2.4",
    "d3-color": "3.1.0",
    "d3-format": "3.1.0",
    "d3-interpolate": "3.0.1",
    "d3-path": "3.1.0",
    "d3-scale": "4.0.2",
    "d3-shape": "3.2.0",
    "d3-time": "3.1.0",
    "d3-time-format": "4.1.0",
}
#: Package and version -> file in it -> file here.
VENDORED = {
    "@dagrejs/dagre@3.1.3": {"dist/dagre.esm.js": "dagre.esm.js", "LICENSE": "dagre.LICENSE"},
    **{
        f"{name}@{version}": {f"dist/{name}.min.js": f"{name}.min.js", "LICENSE": f"{name}.LICENSE"}
        for name, version in D3.items()
    },
}


def fetch(package: str, folder: Path) -> Path:
    """Bring a package of npm. Returns the archive."""
    command = ["npm", "pack", package, "--json", "--ignore-scripts", "--pack-destination", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (packed,) = json.loads(done.stdout)
    return folder / Path(packed["filename"]).name.lstrip("@")


def sums() -> str:
    """The sums of the files that are here, as ``sha256sum`` writes them."""
    names = sorted(name for files in VENDORED.values() for name in files.values())
    return "".join(f"{hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()}  {name}\n" for name in names)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for package, files in VENDORED.items():
            with tarfile.open(fetch(package, Path(folder))) as archive:
                for name, here in files.items():
                    member = archive.extractfile(f"package/{name}")
                    if member is None:
                        raise FileNotFoundError(f"{package} has no {name}")
                    (FOLDER / here).write_bytes(member.read())
    SUMS.write_text(sums(), encoding="utf-8")
    print(sums(), end="")


if __name__ == "__main__":
    main()
