"""Classes of every published generation of vLLM's modular kernel, as their authors write them, and the page's table.

    python -m tools.generations [--write]

Rows are classes, columns generations. A cell says how the class runs: made by the generation's constructor and called
with its arguments, or derived from with its methods. `--write` puts the table into docs/user/modular.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_torch import format_named, modular, quantize

PAGE = Path(__file__).parents[1] / "docs" / "user" / "modular.md"
BEGIN, END = "<!-- begin: python -m tools.generations --write -->", "<!-- end -->"
Standard, Batched = modular.FusedMoEActivationFormat.Standard, modular.FusedMoEActivationFormat.BatchedExperts
E, K, F, TOPK, M = 4, 128, 128, 2, 16

_FIRST = "a1, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input"
_NEWEST = "a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config"
_FINALIZE = "output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input"
_REST = "activation, global_num_experts, expert_map"
_SCALES = "w1_scale, w2_scale, w1_zp, w2_zp"
_MEMORY = "a1q_scale, a2_scale, workspace13, workspace2"
_META = "expert_tokens_meta, apply_router_weight_on_input"
_ROUTED = "output, hidden_states, w1, w2, topk_weights, topk_ids"
_SIZES = "a, aq, M, N, K, topk, global_num_experts, local_num_experts"
_SHAPES = "M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta"


class Generation(NamedTuple):
    """Parameters of each method, and the last release of vLLM that has them."""

    name: str
    release: str
    prepare: str
    finalize: str
    workspace_shapes: str
    apply: str


GENERATIONS = (
    Generation(
        "oldest", "0.9.0", _FIRST, _FINALIZE, "a, M, N, K, topk, num_experts",
        f"hidden_states, w1, w2, topk_ids, {_REST}, {_SCALES}, {_MEMORY}, expert_num_tokens",
    ),
    Generation(
        "0.9.2", "0.9.2", f"{_FIRST}, quant_config", _FINALIZE, _SIZES,
        f"output, hidden_states, w1, w2, topk_ids, {_REST}, {_SCALES}, {_MEMORY}, expert_num_tokens",
    ),
    Generation(
        "middle", "0.10.0", f"{_FIRST}, quant_config, extra_prepare_args",
        f"{_FINALIZE}, weight_and_reduce_impl, extra_finalize_args", f"{_SIZES}, expert_tokens_metadata",
        f"{_ROUTED}, {_REST}, {_SCALES}, {_MEMORY}, {_META}, extra_expert_args",
    ),
    Generation(
        "gpt-oss", "0.11.0", _NEWEST, f"{_FINALIZE}, weight_and_reduce_impl", f"{_SIZES}, expert_tokens_meta",
        f"{_ROUTED}, {_REST}, {_MEMORY}, {_META}",
    ),
    Generation(
        "newest", "0.33.0", f"{_NEWEST}, defer_input_quant", f"{_FINALIZE}, weight_and_reduce_impl",
        f"{_SHAPES}, activation", f"{_ROUTED}, {_REST}, {_MEMORY}, {_META}",
    ),
)  # fmt: skip


def method(name: str, parameters: str, body: Callable[[Any, dict[str, Any]], Any]) -> Any:
    """A method with these parameters, as in a source file."""
    scope: dict[str, Any] = {"body": body}
    exec(f"def {name}(self, {parameters}):\n    return body(self, {{**locals()}})\n", scope)
    return scope[name]


def slots(hidden_states: Any, w1: Any, w2: Any, ids: Any) -> Any:
    """The experts in torch, `[M, topk, K]` in fp32, zeros for ids of -1: an author's kernel."""
    rows = hidden_states.float()[:, None].expand(-1, ids.shape[1], -1)
    safe = ids.clamp(min=0).long()
    gate, up = torch.einsum("mtk,mtnk->mtn", rows, w1.float()[safe]).chunk(2, -1)
    result = torch.einsum("mtf,mtkf->mtk", torch.nn.functional.silu(gate) * up, w2.float()[safe])
    return torch.where((ids >= 0)[..., None], result, 0)


def _apply(self: Any, call: dict[str, Any]) -> Any:
    self.calls_of_apply.append(call | {"quant_config": self.quant_config})
    result = slots(call["hidden_states"], call["w1"], call["w2"], local(call["topk_ids"], call["expert_map"]))
    result = result.to(call["hidden_states"].dtype)
    if "output" not in call:
        return result
    call["output"].copy_(result.view_as(call["output"]))
    return None


def local(ids: Any, expert_map: Any) -> Any:
    return ids if expert_map is None else torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1)


def _shapes(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def body(self: Any, call: dict[str, Any]) -> Any:
        M, N, K, topk = (call[letter] for letter in ("M", "N", "K", "topk"))
        if name == "oldest":
            return M * topk * max(N, K), M * topk * N, call["a"].dtype
        shapes = (M, topk, max(N, K)), (M, topk, N // 2), (M * topk, K)
        return shapes if name == "newest" else (*shapes, call["a"].dtype)

    return body


def experts_class(generation: Generation, base: type = modular.FusedMoEPermuteExpertsUnpermute) -> type:
    """Experts of a generation that leave weights and sums to finalize."""
    name, delegate = generation.name, modular.TopKWeightAndReduceDelegate()
    members: dict[str, Any] = {
        "__init__": lambda self, *configs: (base.__init__(self, *configs), setattr(self, "calls_of_apply", []))[1],
        "workspace_shapes": method("workspace_shapes", generation.workspace_shapes, _shapes(name)),
        "apply": method("apply", generation.apply, _apply),
    }
    if name not in ("oldest", "0.9.2"):
        members["finalize_weight_and_reduce_impl"] = lambda self: delegate
    if name == "newest":
        members["activation_format"] = staticmethod(lambda: Standard)
    elif name != "oldest":
        members["activation_formats"] = property(lambda self: (Standard, Standard))
    if name not in ("oldest", "newest"):
        members |= {"supports_chunking": lambda self: True, "supports_expert_map": lambda self: True}
    return type(f"Experts_{name}", (base,), members)


def _prepare(self: Any, call: dict[str, Any]) -> Any:
    x = call["a1"] * call["topk_weights"] if call["apply_router_weight_on_input"] else call["a1"]
    return (x, None, None) if "quant_config" not in call else (x, None, None, None, None)


def _finalize(self: Any, call: dict[str, Any]) -> None:
    output, rows, weights = call["output"], call["fused_expert_output"], call["topk_weights"]
    rows = rows.view(*weights.shape, rows.shape[-1]).float()
    if not call["apply_router_weight_on_input"]:
        rows = rows * weights[..., None]
    output.copy_(rows.sum(1))


def part_class(generation: Generation) -> type:
    """A prepare-and-finalize of one device."""
    members: dict[str, Any] = {
        "prepare": method("prepare", generation.prepare, _prepare),
        "finalize": method("finalize", generation.finalize, _finalize),
    }
    if generation.name != "oldest":
        members["activation_format"] = property(lambda self: Standard)
    return type(f"Part_{generation.name}", (modular.FusedMoEPrepareAndFinalize,), members)


# --- The table -------------------------------------------------------------------------------------------------------

_FP8 = {"use_fp8_w8a8": True, "block_shape": [128, 128]}
#: This library's classes, and the first generation that published each.
EXPERTS = {
    "TritonExperts": "oldest",
    "DeepGemmExperts": "oldest",
    "TritonOrDeepGemmExperts": "oldest",
    "BatchedTritonExperts": "oldest",
    "BatchedDeepGemmExperts": "0.9.2",
    "OAITritonExperts": "gpt-oss",
    "UnfusedOAITritonExperts": "gpt-oss",
}
_NAMES = tuple(generation.name for generation in GENERATIONS)


def problem(quantized: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a kernel, w1 `[E, N, K]`, and the scales of weights that are quantised."""
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(M, K, generator=random), torch.rand(M, TOPK, generator=random)
    ids = torch.stack([torch.randperm(E, generator=random)[:TOPK] for _ in range(M)]).int()
    ids[0, 1] = -1
    w1, w2 = (torch.randn(shape, generator=random) / 11 for shape in ((E, 2 * F, K), (E, K, F)))
    if not quantized:
        return (x, w1, w2, weights, ids), {}
    pairs = [quantize(weight, format_named("fp8_block")) for weight in (w1, w2)]
    scales = {f"w{number}_scale": pair.scales for number, pair in enumerate(pairs, 1)}
    return (x, *(pair.values for pair in pairs), weights, ids), scales


def made(name: str, generation: str, scales: dict[str, Any]) -> Any:
    """This library's experts, by the constructor of a generation: of flags, a configuration, or two of them."""
    kind, counts = getattr(modular, name), (M, 1) if name.startswith("Batched") else ()
    options = {"allow_deep_gemm": True} if name == "TritonOrDeepGemmExperts" else {}
    if generation in _NAMES[:3]:
        flags = {"DeepGemmExperts": {}, "BatchedDeepGemmExperts": {"block_shape": [128, 128]}}.get(name, _FP8)
        return kind(*counts, **flags, **options)
    config = modular.FusedMoEQuantConfig.make(**(_FP8 if scales else {}), **scales)
    if generation == "newest":
        return kind(object(), config, *counts)
    return kind(*counts, quant_config=config, **options)


def kernel_of(experts: Any) -> Any:
    batched = experts.activation_formats[0] == Batched
    part = modular.BatchedPrepareAndFinalize(M, E) if batched else modular.MoEPrepareAndFinalizeNoEP()
    return modular.FusedMoEModularKernel(part, experts)


def experts_cell(name: str, generation: Generation) -> str:
    """`made`: the constructor, and a call of a kernel with the scales. `called`: `apply` with its arguments."""
    if _NAMES.index(generation.name) < _NAMES.index(EXPERTS[name]):
        return ""
    (x, w1, w2, *routing), scales = problem("OAI" not in name)
    if "OAI" in name:
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
    expected = kernel_of(made(name, "newest", scales))(x, w1, w2, *routing)
    experts, calls, with_call = made(name, generation.name, scales), [], generation.name in _NAMES[:3]
    result = kernel_of(experts)(x, w1, w2, *routing, **(scales if with_call else {}))
    if not torch.equal(result, expected):
        return "differs"
    whole = made(name, "newest", scales)
    run, whole.run = whole.run, lambda call: (run(call), calls.append(call._replace(output=call.output.clone())))[0]
    kernel_of(whole)(x, w1, w2, *routing)
    values = calls[0]._asdict() | (scales if with_call else {})
    values |= {"output": torch.full_like(calls[0].output, torch.nan), "w1": w1, "w2": w2}
    names = generation.apply.split(", ")
    if "topk_weights" not in names:
        return "made"  # weights and sums were the caller's
    experts.apply(**{name: values.get(name) for name in names})
    return "made, called" if torch.equal(values["output"], calls[0].output) else "differs"


def base_cell(kind: str, generation: Generation) -> str:
    """A class that derives from the interface runs beside one of each generation, whole and in chunks."""
    arguments, _ = problem(False)
    expected = kernel_of(modular.TritonExperts())(*arguments)
    for other in GENERATIONS:
        pair = (generation, other) if kind == "experts" else (other, generation)
        experts, part = experts_class(pair[0])(), part_class(pair[1])()
        torch.testing.assert_close(modular.FusedMoEModularKernel(part, experts)(*arguments), expected)
    return "derived, in chunks" if kind == "experts" and experts_class(generation)().supports_chunking() else "derived"


def table() -> list[tuple[str, ...]]:
    """(class, a cell for each generation), as measured on this machine."""
    with torch.no_grad():
        rows = [("`FusedMoEPermuteExpertsUnpermute`", *(base_cell("experts", one) for one in GENERATIONS))]
        rows.append(("`FusedMoEPrepareAndFinalize`", *(base_cell("part", one) for one in GENERATIONS)))
        rows += [(f"`{name}`", *(experts_cell(name, one) for one in GENERATIONS)) for name in EXPERTS]
        return rows


def render(rows: list[tuple[str, ...]]) -> str:
    heading = (
        "class",
        *(f"{one.name} ({one.release})" if one.name != one.release else one.name for one in GENERATIONS),
    )
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault(tuple(cells), []).append(name)
    lines = (heading, ("---",) * len(heading), *((", ".join(names), *cells) for cells, names in alike.items()))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def published() -> str:
    return PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options, text = parser.parse_args(), render(table())
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
