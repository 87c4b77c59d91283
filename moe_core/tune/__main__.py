"""`python -m moe_core.tune`."""

import sys

from moe_core.tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
