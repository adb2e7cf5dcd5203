"""``python -m framework``: the command ``ratchet``."""

from framework.commands.cli import app

if __name__ == "__main__":
    app(prog_name="ratchet")
