"""The story of ``docs/story.md`` is true: each of its commands prints what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from integration import EmbeddedServers
from ratchet.demo import flights_data

PAGE = Path(__file__).parent.parent.parent / "docs" / "story.md"
BLOCK = re.compile(r"(?P<corrected><!-- corrected -->\n)?```(?P<language>python|console)\n(?P<text>.*?)```", re.S)
PROMPT = "(Pdb) "
#: A rebuild that takes some seconds says how far it is. The page leaves this out.
PROGRESS = re.compile(r"^rebuilt to transaction .* a second\n", re.M)


@pytest.mark.slow
@pytest.mark.integration
def test_every_command_of_the_story_prints_what_the_page_shows(servers: EmbeddedServers, tmp_path: Path) -> None:
    flights_data.load(servers.bootstrap_servers, "flights")
    (tmp_path / "delays.toml").write_text(
        f'"transactional.zookeeper.servers" = "{servers.zookeeper}"\n"app.kafka" = "{servers.bootstrap_servers}"\n'
    )
    code, commands = tmp_path / "delays.py", 0
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["corrected"]:
            wrong = next(line for line in code.read_text().splitlines(keepends=True) if "abs(" in line)
            code.write_text(code.read_text().replace(wrong, block["text"]))
        elif block["language"] == "python":
            code.write_text(block["text"])
        else:
            for command, shown in re.findall(r"^\$ ratchet (.*)\n((?:(?!\$ ).*\n)*)", block["text"], re.M):
                commands += 1
                assert_prints(tmp_path, command, shown)
    assert commands == 11


def assert_prints(folder: Path, command: str, shown: str) -> None:
    typed = re.findall(rf"^{re.escape(PROMPT)}(.*)$", shown, re.M)
    code = folder / "delays.py"
    written = code.read_text()
    if typed:  # the page says to put it there
        code.write_text(
            written.replace("            collector.emit", "            breakpoint()\n            collector.emit")
        )
    done = subprocess.run(
        [sys.executable, "-m", "ratchet", *shlex.split(command)],
        cwd=folder,
        input="".join(f"{line}\n" for line in typed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    code.write_text(written)
    printed = PROGRESS.sub("", done.stdout)
    for line in typed:  # what a terminal shows as it is typed
        shown = shown.replace(f"{PROMPT}{line}\n", PROMPT)
    wanted = "".join(".*?" if part == "…" else re.escape(part) for part in re.split("(…)", shown.strip()))
    assert re.fullmatch(wanted, printed.strip(), re.S), f"{command}\n{done.stdout}\n--- the page shows\n{shown}"
