"""``ratchet describe``."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from framework.commands.describe import app


def test_a_pipeline_is_described_with_its_inputs_and_guarantees(tmp_path: Path) -> None:
    settings = ["app.kafka=127.0.0.1:1", "app.topic=orders", f"app.folder={tmp_path}"]
    words = ["tests.kit.orders_pipeline:pipeline", *(each for setting in settings for each in ("--set", setting))]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("orders: exactly once\n")
    assert "closed  (WindowedCommitter, 1 task)" in done.stdout
    assert "takes      closed-watermark by AllGrouping" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_pipeline_is_one_line() -> None:
    done = CliRunner().invoke(app, ["tests.kit.orders_pipeline:nothing"], catch_exceptions=False)
    assert done.exit_code == 2
    assert (
        done.output == "error: tests.kit.orders_pipeline:nothing: module 'tests.kit.orders_pipeline' has no 'nothing'\n"
    )


def test_what_is_no_pipeline_is_told_with_what_may_be_named() -> None:
    done = CliRunner().invoke(app, ["tests.commands.test_describe:__doc__"], catch_exceptions=False)
    assert "is a str: name a Pipeline, a Topology, or a function that makes one" in done.output
    assert done.exit_code == 2
