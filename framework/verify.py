"""Entry point of ``python -m framework.verify``, and ``verify`` for programs."""

from framework.commands.verify import app
from framework.inspect.recompute import Unverifiable
from framework.inspect.verify import VerifyReport, verify

__all__ = ["Unverifiable", "VerifyReport", "verify"]

if __name__ == "__main__":
    app()
