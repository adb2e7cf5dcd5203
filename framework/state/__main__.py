"""``python -m framework.state``: the command of the state, which has the package's name."""

import runpy

runpy.run_module("framework.commands.state", run_name="__main__")
