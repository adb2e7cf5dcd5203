"""``python -m framework.state``: the state command, under the name of the package."""

import runpy

runpy.run_module("framework.commands.state", run_name="__main__")
