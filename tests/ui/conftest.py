"""Pages of a machine that may stand still."""

from __future__ import annotations

import pytest

from framework.ui import app
from tests.kit.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_pages() -> None:
    """Let a source take its time for its first answer: a page would say that nothing answered."""
    app.FIRST_S = PATIENCE_S
