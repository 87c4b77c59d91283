"""`python -m moe_core.parity`: the parity tool."""

import sys

from moe_core.parity.cli import main

if __name__ == "__main__":
    sys.exit(main())
