"""``python -m fed`` is the command line too."""

import sys

from fed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
