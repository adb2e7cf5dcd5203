"""``python -m ratchet.demo load`` fills the demo's topic on your own brokers, and ``compare``
compares the tables with the file. The configuration is that of the driver: ``app.kafka`` and
``app.database``."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from framework import Config
from framework.commands.exit_status import exit_codes
from ratchet.demo.flights import TOPIC
from ratchet.demo.flights_data import FLIGHTS, load
from ratchet.demo.flights_demo import compare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ratchet.demo", description="The demo on servers of one's own.")
    parser.add_argument("what", choices=["load", "compare"])
    parser.add_argument("--config", default=os.environ.get("RATCHET_CONFIG"), help="as in ratchet run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in ratchet run")
    given = parser.parse_args()
    with exit_codes():
        app = Config.load(given.config, given.set).app
        if given.what == "compare":
            return compare(Console(), str(app["app.database"]))
        sent = load(str(app["app.kafka"]), TOPIC)
        print(f"sent {sent:,} flights to the topic {TOPIC!r}" if sent else f"all {FLIGHTS:,} flights are there")  # noqa: T201
        return 0


if __name__ == "__main__":
    sys.exit(main())
