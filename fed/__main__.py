"""Entry of ``fed`` and of ``python -m fed``: an interrupt while the command line loads ends it as a later one does."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command of this process; returns the exit code."""
    try:
        from fed.cli.main import main as command_line
    except BaseException as error:
        from fed.errors import is_interrupt  # only now: what loads before this function cannot be caught

        if is_interrupt(error):
            return 130
        raise
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
