"""Where the checkout is."""

from __future__ import annotations

from pathlib import Path

#: The root of the checkout.
ROOT = Path(__file__).resolve().parents[2]
