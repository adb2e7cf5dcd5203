"""``python -m framework.state``."""

from framework.state_command import main

if __name__ == "__main__":
    main()
