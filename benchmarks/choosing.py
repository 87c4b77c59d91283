"""What `moebius-choose` knows: layer times out of records, and the tables of docs/user/choosing.md.

    python -m benchmarks.choosing

Of records with the same cell the newest counts, of weights in kernels' order if it has both. Rewrites
moe_core/tools/choose/measured.json and the tables between the page's markers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_core.tools.choose.estimate import choose_parallelism, measured
from moe_core.tools.choose.models import GB, GPUS, MODELS, Gpu, Model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = ROOT / "moe_core" / "tools" / "choose" / "measured.json"
PAGE = ROOT / "docs" / "user" / "choosing.md"
#: Records of older versions, of other layouts and of single questions.
_SKIPPED = re.compile(r"before|layouts|ragged|ratios|again|published|rows|peer-h200|sonicmoe")
_GPUS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
_SHAPES = {model.shape for model in MODELS.values()}
_KINDS = {"forward": "bf16", "step": "training"}


def cells() -> list[list[Any]]:
    """[gpu, shape, format or training, tokens, us, record] of one layer on one GPU, sorted."""
    best: dict[tuple[str, str, str, int], tuple[str, bool, float, str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        provenance = record.get("provenance", {})
        gpu = _GPUS.get(provenance.get("device", ""))
        if gpu is None or _SKIPPED.search(path.stem):
            continue
        for key, prepared, us in _rows(record):
            cell, found = (gpu, *key), (provenance["date"], prepared, us, path.name)
            if key[0] in _SHAPES and (cell not in best or found[:2] > best[cell][:2]):
                best[cell] = found
    return [[*cell, round(us, 1), name] for cell, (_, _, us, name) in sorted(best.items())]


def _rows(record: dict[str, Any]) -> Iterator[tuple[tuple[str, str, int], bool, float]]:
    """((shape, kind, tokens), weights are prepared, us)."""
    for row in record.get("rows", []):
        if (
            row.get("routing", "balanced") not in ("balanced", "router")
            or row.get("weight_layout", "out_in") == "in_out"
        ):
            continue
        if "torch_us" in row:
            kind = row.get("scheme") or _KINDS.get(row.get("mode"))
            if kind is not None and row["torch_us"]:
                yield (row["shape"], kind, row["tokens"]), row.get("prepared", False), row["torch_us"]
        elif row.get("what") == "forward" and row.get("alone_graph_us"):
            # One rank alone, in a record of several.
            yield (row["shape"], "bf16", row["tokens"]), False, row["alone_graph_us"]


def table(gpu: Gpu, *, training: bool) -> str:
    """The best option of every model that fits on 1 to 8 GPUs."""
    tokens = 16384 if training else 64
    head = f"| model | {' | '.join(f'{n} x {gpu.name.upper()}' for n in (1, 2, 4, 8))} |\n|---|---|---|---|---|"
    lines = (_line(model, gpu, tokens, training) for model in MODELS.values())
    return "\n".join([head, *filter(None, lines)])


def _line(model: Model, gpu: Gpu, tokens: int, training: bool) -> str | None:
    texts = []
    for gpus in (1, 2, 4, 8):
        best = choose_parallelism(model, gpu, gpus, tokens * gpus, training=training)[0]
        if best.why_not is not None or best.time is None:
            texts.append("—")
            continue
        mark = {"measured": "", "between records": "~"}.get(best.time.source, "*")
        format = "" if training else f"{best.format} "
        ways = {gpus: " EP", 1: ""}.get(best.experts, f" EP{best.experts}")
        texts.append(f"{format}{best.spent / GB:.0f} GB{ways}: {_short(best.tokens_per_second)}{mark}")
    return f"| {model.name} | {' | '.join(texts)} |" if set(texts) != {"—"} else None


def _short(number: float) -> str:
    """Two digits."""
    rounded = float(f"{number:.2g}")
    return f"{rounded / 1e6:g} M" if rounded >= 1e6 else f"{rounded / 1e3:g} k"


def weights_table() -> str:
    """Bytes of each model in each format."""
    formats = ("bf16", "fp8_block", "int4_g128", "mxfp4")
    lines = [f"| model | {' | '.join(formats)} |", "|---|---|---|---|---|"]
    for model in MODELS.values():
        sizes = []
        for format in formats:
            option = next(iter(choose_parallelism(model, GPUS["h200"], 1, 1, format=format)))
            sizes.append("—" if option.time is None else f"{option.weights / GB:.1f}")
        lines.append(f"| {model.name} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Tables of the page by marker."""
    named = {"weights": weights_table()}
    for gpu in GPUS.values():
        named |= {f"{work} {gpu.name}": table(gpu, training=work == "training") for work in ("serving", "training")}
    return named


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    for marker, content in tables().items():
        pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"{PAGE.name} must have one table {marker!r}, got {count}; add its markers")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    lines = ",\n".join(json.dumps(cell) for cell in cells())
    MEASURED.write_text(f"[\n{lines}\n]\n")
    measured.cache_clear()
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(f"{MEASURED.name}: {len(lines.splitlines())} times; {PAGE.name}: {len(tables())} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
