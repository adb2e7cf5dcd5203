"""Entry point of ``python -m framework.reset``, and ``reset_everything`` for programs."""

from framework.commands.reset import app
from framework.transactions.reset import reset_everything

__all__ = ["reset_everything"]

if __name__ == "__main__":
    app()
