"""Entry point of ``python -m framework.verify``, and ``verify`` for programs."""

from framework.commands.verify import app
from framework.transactions.audit import VerifyReport, verify
from framework.transactions.recompute import Unverifiable

__all__ = ["Unverifiable", "VerifyReport", "verify"]

if __name__ == "__main__":
    app()
