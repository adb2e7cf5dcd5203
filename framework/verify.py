"""Entry point of ``python -m framework.verify``, and ``verify`` for programs."""

from framework.commands.verify import app
from framework.transactions.audit import Unverifiable, VerifyReport, verify

__all__ = ["Unverifiable", "VerifyReport", "verify"]

if __name__ == "__main__":
    app()
