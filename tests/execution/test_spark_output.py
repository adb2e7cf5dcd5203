"""What Spark prints while it starts and ends is in a file; what tasks print in between is shown."""

from __future__ import annotations

import subprocess

import pytest

from framework.execution.spark.output import SparkOutput
from tests.kit.stores import wait_for


def test_output_goes_to_the_log_file_until_it_is_shown_and_after_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    output = SparkOutput()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, text=True, bufsize=1, **output.popen_arguments())
    output.started()
    assert process.stdin is not None
    seen: list[str] = []

    def shown() -> str:
        seen.append(capsys.readouterr().err)
        return "".join(seen)

    process.stdin.write("a banner\n")
    wait_for(lambda: output.log.read_text() == "a banner\n")
    output.show(True)
    process.stdin.write("a user's print\n")
    wait_for(lambda: shown() == "a user's print\n")
    output.show(False)
    process.stdin.write("a worker that was ended\n")
    wait_for(lambda: output.log.read_text() == "a banner\na worker that was ended\n")
    process.stdin.close()
    process.wait()
    assert shown() == "a user's print\n"
    output._forget_log()
    assert not output.log.exists()


def test_the_log_file_of_what_failed_is_kept() -> None:
    output = SparkOutput()
    output.started()
    assert output.keep_log() == output.log
    output._forget_log()
    assert output.log.exists()
    output.log.unlink()
