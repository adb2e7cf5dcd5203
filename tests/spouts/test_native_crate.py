"""The compiled part's own tests: random bytes for the JSON reader, with overflow checks, and random
records through the calls of librdkafka, with every access to memory checked.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from spouts.kafka.consumer.native_range_consumer import librdkafka
from tests.kit.processes import ROOT

CRATE = str(ROOT / "spouts/native/Cargo.toml")
FUZZED = "random_records_come_back_as_they_were_sent"
FOUND_BY_VALGRIND = 9


@pytest.fixture(scope="module")
def cargo() -> str:
    found = shutil.which("cargo")
    if found is None:
        pytest.skip("there is no Rust compiler: what is tested here was not built either")
    return found


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    library = os.pathsep.join(filter(None, [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]))
    seed = str(random.randrange(1, 1 << 32))
    print(f"RATCHET_FUZZ_SEED={seed}")
    return {
        **os.environ,
        "PYO3_PYTHON": sys.executable,
        "LD_LIBRARY_PATH": library,
        "RATCHET_LIBRDKAFKA": librdkafka() or "",
        "RATCHET_FUZZ_SEED": os.environ.get("RATCHET_FUZZ_SEED", seed),
    }


@pytest.mark.slow
def test_the_tests_of_the_compiled_part_pass(cargo: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [cargo, "test", "--locked", "--manifest-path", CRATE, "--", "--show-output"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("random_bytes_leave_whole_rows_or_none", FUZZED):
        assert f"{name} ... ok" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_what_librdkafka_lends_is_used_within_its_life_and_given_back_once(
    cargo: str, environment: dict[str, str]
) -> None:
    """Random records through a simulated cluster, under valgrind: it sees each access of the
    compiled part and of librdkafka.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip(
            "valgrind is not installed (apt-get install valgrind): the records are compared, memory is not checked"
        )
    built = subprocess.run(
        [cargo, "test", "--no-run", "--locked", "--message-format=json", "--manifest-path", CRATE],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    (binary,) = {each["executable"] for each in messages if each.get("executable")}
    assert Path(binary).exists()
    checks = ["--leak-check=full", "--errors-for-leak-kinds=definite", f"--error-exitcode={FOUND_BY_VALGRIND}"]
    done = subprocess.run(
        [valgrind, "-q", *checks, binary, FUZZED, "--show-output"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FUZZED} ... ok" in done.stdout
    assert "skipped" not in done.stdout
