"""``python -m ratchet``: the command, for environments where its script is not on the path."""

from ratchet.console import main

if __name__ == "__main__":
    main()
