"""`moebius-choose`."""

from moe_core.tools.choose.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
