"""`python -m moe_core.tools.tune`."""

import sys

from moe_core.tools.tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
