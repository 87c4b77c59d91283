"""`moebius-tune`."""

from moe_core.tools.tune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
