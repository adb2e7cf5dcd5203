"""Entry point of ``python -m framework.run``."""

from framework.commands.run import app

if __name__ == "__main__":
    app()
