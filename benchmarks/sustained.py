"""Sustained times and energy: a CUDA graph is replayed without a pause, so that the chip runs at its power limit."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: A queue of so many replays keeps the device busy, and lets the host look at the clock.
_REPLAYS = 10
#: From so many tokens on, records have sustained times: with fewer, single replays of a cold cache are what matters.
LEAST_TOKENS = 1024
#: Of one turn.
_SECONDS = 0.3


class Meter:
    """Joules that the current CUDA device has used since its driver was loaded (`libnvidia-ml`)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} failed with status {status}; the driver has no energy counter of this GPU")

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3


def sustained(
    replays: Mapping[str, Callable[[], Any]], joules: Callable[[], float], seconds: float = _SECONDS
) -> dict[str, dict[str, float]]:
    """By name {"joules", "us", "watts"} of one call: the mean of two turns of `seconds` in the order A B B A."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in replays}
    names = list(replays)
    # One more turn ahead heats the chip.
    for name in (names[0], *names, *names[::-1]):
        wait()
        before, start, calls = joules(), time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < seconds:
            for _ in range(_REPLAYS):
                replays[name]()
            wait()
            calls += _REPLAYS
        elapsed = time.perf_counter() - start
        turns[name].append(((joules() - before) / calls, elapsed / calls))
    turns[names[0]].pop(0)
    found = {}
    for name, measured in turns.items():
        used, took = (statistics.mean(one) for one in zip(*measured, strict=True))
        found[name] = {"joules": used, "us": took * 1e6, "watts": used / took}
    return found


def beside(
    row: Mapping[str, Any], name: str, ours: Callable[[], Any], other: Callable[[], Any], timer: Any
) -> dict[str, Any]:
    """What is new in a row of at least LEAST_TOKENS: sustained times and energy of ours and another."""
    tokens = row["tokens"]
    if tokens < LEAST_TOKENS:
        return {}
    found = timer.sustained({"ours": ours, name: other})
    figures = {key: {"us": one["us"], "mj_per_token": one["joules"] * 1e3 / tokens} for key, one in found.items()}
    return {
        "sustained": {**row.get("sustained", {}), name: figures},
        f"sustained_over_{name}": found["ours"]["us"] / found[name]["us"],
        "sustained_us": figures["ours"]["us"],
        "mj_per_token": figures["ours"]["mj_per_token"],
    }
