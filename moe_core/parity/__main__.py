"""`moe-parity`."""

from moe_core.parity.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
