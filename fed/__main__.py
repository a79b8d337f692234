"""Entry of ``fed`` and of ``python -m fed``: an interrupt while the command line loads ends it as a later one does."""

import atexit
import contextlib
import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command of this process; returns the exit code."""
    end = _End()
    atexit.register(end.leave)  # before those of all libraries, and so the last that is called
    try:
        from fed.cli.main import main as command_line
    except BaseException as error:
        from fed.errors import is_interrupt  # only now: what loads before this function cannot be caught

        if is_interrupt(error):
            return 130
        raise
    end.code = command_line()
    return end.code


class _End:
    """End of a command that has an exit code: threads have been waited for, and libraries have tidied up.

    The interpreter would free each object before it ends, for which it takes half a second once PyTorch is loaded.
    """

    code: int | None = None

    def leave(self) -> None:
        """End the process; the interpreter does, where there is no code or output cannot be written."""
        if self.code is None:
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


if __name__ == "__main__":
    sys.exit(main())
