"""The compiled part's own tests: random bytes for the JSON reader, with overflow checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.kit.processes import ROOT


@pytest.mark.slow
def test_the_tests_of_the_compiled_part_pass() -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("there is no Rust compiler")
    library = os.pathsep.join(filter(None, [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]))
    done = subprocess.run(
        [cargo, "test", "--locked", "--manifest-path", str(ROOT / "spouts/native/Cargo.toml")],
        env={**os.environ, "PYO3_PYTHON": sys.executable, "LD_LIBRARY_PATH": library},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random_bytes_leave_whole_rows_or_none ... ok" in done.stdout
