"""What is refused by choice: by case, a part of the message, and the reason that the table shows."""

from __future__ import annotations

VLLM: dict[str, tuple[str, str]] = {}
