"""MaxText's `RoutedMoE` with each of its grouped products, and ours: tokens per second of a forward and of gradients.

    python -m benchmarks.models.maxtext --package FOLDER/maxtext [--tokens 1024,4096] [--output RECORD]

FOLDER has the files of MaxText 0.2.5's wheel. Each way runs in a process of its own, all with the same weights, and its
result must be near that of `moe_jax.maxtext.RoutedMoE`. A way that cannot run has its `reason`. tokamax 0.0.17 and
megablox also need qwix, and tokamax xprof. MaxText interprets megablox, a Pallas kernel for TPUs, on other devices.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.jax_layers import median_us
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, table, write_record

#: Way -> options of its MaxText config.
WAYS: dict[str, dict[str, Any]] = {
    "moe_jax.maxtext.RoutedMoE": {},
    "moe_jax.ragged_dot": {},
    "ragged_dot": {},
    "tokamax": {"use_tokamax_gmm": True},
    "megablox": {"megablox": True},
}
#: Of the result's norm: bf16 roundings between operations.
TOLERANCE = 2e-2
#: d_model, d_ff, experts, top_k: qwen3-30b-a3b's, and of `--tiny`.
SIZES, TINY = (2048, 768, 128, 8), (32, 48, 8, 2)
COLUMNS = {"way": "way", "tokens": "tokens", "forward_us": "forward, us", "step_us": "gradients, us"}
COLUMNS |= {"forward_tokens": "tokens/s, forward", "step_tokens": "tokens/s, gradients", "error": "error"}
COLUMNS |= {"reason": "reason"}


def measure(way: str, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Microseconds of a forward and of all gradients, with the host, and a file with the result."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import moe_jax
    from tools.upstream import maxtext_moe as upstream

    d_model, d_ff, experts, top_k = TINY if options.tiny else SIZES
    config = upstream.read(options.package, "base") | upstream.CONFIG | {"emb_dim": d_model, "num_experts": experts}
    config |= {"num_experts_per_tok": top_k, "base_moe_mlp_dim": d_ff, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
    # Ours routes in fp32, and bf16 logits choose other experts.
    config |= {"float32_gate_logits": True}
    stand_ins, served = dict(upstream.STAND_INS), upstream.SERVED
    if WAYS[way]:
        del stand_ins["tokamax"], stand_ins["qwix.pallas"]
        kernels = ("backend", "common", "ops", *(f"pallas_mosaic_tpu_v2_{name}_kernel" for name in ("gmm", "tgmm")))
        served += ("maxtext.kernels.megablox", *(f"maxtext.kernels.megablox.{name}" for name in kernels))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(upstream, STAND_INS=stand_ins, SERVED=served))
        moe, init, mesh = stack.enter_context(upstream.opened(options.package))
        kind = moe.RoutedMoE
        if way == "moe_jax.ragged_dot":
            stack.enter_context(mock.patch.object(jax.lax, "ragged_dot", moe_jax.ragged_dot))
        elif way.startswith("moe_jax"):
            kind = importlib.import_module("moe_jax.maxtext").RoutedMoE
        # With equal seeds all ways have equal weights.
        sizes = upstream.Config(**(config | WAYS[way])), experts, top_k
        dtypes = {"dtype": jnp.bfloat16, "weight_dtype": jnp.bfloat16}
        rngs = nnx.Rngs(params=7)
        layer = kind(*sizes, mesh, init, ("embed", None), rngs, intermediate_dim=d_ff, **dtypes)
        graph, weights, rest = nnx.split(layer, nnx.Param, ...)
        x = jax.random.normal(jax.random.key(1), (max(1, tokens // 1024), min(tokens, 1024), d_model), jnp.bfloat16)

        @jax.jit
        def forward(weights: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graph, weights, rest)(x)[0]

        @jax.jit
        def step(weights: Any, x: jax.Array) -> Any:
            return jax.grad(lambda *both: jnp.square(forward(*both).astype(jnp.float32)).mean(), (0, 1))(weights, x)

        y = np.asarray(forward(weights, x).astype(jnp.float32))
        file = options.folder / f"{way}-{tokens}.npy"
        np.save(file, y)
        calls = 2 if options.tiny else 10
        times = [median_us(function, (weights, x), calls=calls) for function in (forward, step)]
    return dict(zip(("forward_us", "step_us"), times, strict=True))


def _rows_of(way: str, options: argparse.Namespace) -> None:
    for tokens in options.tokens:
        row: dict[str, Any] = {"way": way, "tokens": tokens}
        try:
            row |= measure(way, options, tokens)
            row |= {f"{kind}_tokens": tokens / row[f"{kind}_us"] * 1e6 for kind in ("forward", "step")}
        except Exception as error:  # the reason is its figure
            row["reason"] = reason_of(error)
        print(json.dumps(row), flush=True)


def collect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every way, each from its process."""
    rows: list[dict[str, Any]] = []
    for way in options.ways:
        words = [sys.executable, "-m", "benchmarks.models.maxtext", "--way", way, "--folder", str(options.folder)]
        words += ["--package", str(options.package), "--tokens", ",".join(map(str, options.tokens))]
        reason = f"no result after {options.limit} s"
        try:
            command = [*words, *(["--tiny"] if options.tiny else [])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
            text, reason = done.stdout, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        except subprocess.TimeoutExpired as error:
            text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        of_way = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        missing = [tokens for tokens in options.tokens if tokens not in [row["tokens"] for row in of_way]]
        rows += of_way + [{"way": way, "tokens": tokens, "reason": reason[:300]} for tokens in missing]
    return rows


def compare(rows: list[dict[str, Any]], folder: pathlib.Path) -> list[str]:
    """Add the `error` of every row with a result. Returns the rows that are too far from ours."""
    wrong = []
    for row in rows:
        files = [folder / f"{way}-{row['tokens']}.npy" for way in (row["way"], next(iter(WAYS)))]
        if "step_us" in row and files[1].exists():
            y, ours = map(np.load, files)
            row["error"] = float(np.linalg.norm(y - ours) / np.linalg.norm(ours))
            if not row["error"] <= TOLERANCE:
                wrong.append(f"{row['way']} at {row['tokens']} tokens differs by {row['error']:.1e} of the norm")
        elif row["way"].startswith("moe_jax"):
            wrong.append(f"{row['way']} at {row['tokens']} tokens: {row.get('reason', 'nothing to compare with')}")
    return wrong


def main() -> int:
    parser = command(__doc__, limit=120)
    parser.add_argument("--package", type=pathlib.Path, required=True, help="the folder `maxtext` of its wheel's files")
    parser.add_argument("--tokens", type=lambda text: [*map(int, text.split(","))], default=[1024, 4096])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        _rows_of(options.way, options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.folder = pathlib.Path(folder)
        rows = collect(options)
        wrong = compare(rows, options.folder)
    record = {"provenance": provenance("benchmarks.models.maxtext"), "sizes": TINY if options.tiny else SIZES}
    write_record(options.output, record | {"rows": rows})
    print(table(rows, COLUMNS), *wrong, sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
