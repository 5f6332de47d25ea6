"""`python -m zero_ref.cli` is `zero-ref`."""

import sys

from zero_ref.cli import main

if __name__ == "__main__":
    sys.exit(main())
