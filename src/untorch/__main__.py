"""``python -m untorch``: the command line."""

from untorch.cli import main

if __name__ == "__main__":
    main()
