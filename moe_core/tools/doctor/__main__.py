"""`moebius-doctor`."""

from moe_core.tools.doctor.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
