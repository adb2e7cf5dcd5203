"""``python -m framework.state``."""

from framework.commands.state import main

if __name__ == "__main__":
    main()
