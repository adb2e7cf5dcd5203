"""``python -m ratchet``: the command, where its script is not on the path."""

from ratchet.console import main

if __name__ == "__main__":
    main()
