"""`moebius-view`."""

from moe_core.view.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
