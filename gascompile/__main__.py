"""``python -m gascompile``: the same as the ``gascompile`` command."""

from gascompile.cli import main

if __name__ == "__main__":
    main()
