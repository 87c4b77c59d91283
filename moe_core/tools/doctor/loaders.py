"""How other loaders read a checkpoint, by the rules of their published versions.

Sources: transformers 5.23 `integrations/compressed_tensors.py` and `finegrained_fp8.py`; vLLM 0.33
`compressed_tensors_moe`; SGLang 0.5.23 `compressed_tensors`. A rule names a difference that their code makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

TRANSFORMERS, VLLM, SGLANG = "transformers 5.23", "vLLM 0.33", "SGLang 0.5.23"
#: Families whose experts transformers reads one by one from compressed-tensors, though its modules are fused.
_REPLACED = ("llama4_text",)


@dataclass(frozen=True)
class Facts:
    """One layer. labels: of its experts' matrices. kind: `format` of compressed-tensors, or "".

    splits: gate, up and down of an expert are stored alike. fused_only: the family has no experts one by one.
    other_layers: some layers are plain, others quantised. scales_differ: one scale per matrix, other for gate and up.
    lacks_shared: the files hold none of the shared experts of config.json.
    """

    method: str
    family: str
    labels: frozenset[str]
    kind: str
    d_ff: int
    splits: bool
    one_by_one: bool
    fused_only: bool
    other_layers: bool
    static: bool
    zero_points: bool
    scales_differ: bool
    weight_only: bool
    lacks_shared: bool

    @property
    def mixed(self) -> bool:
        return len(self.labels) > 1

    def all_are(self, *starts: str) -> bool:
        return any(label.startswith(starts) for label in self.labels)


Rule = tuple[tuple[str, ...], Callable[[Facts], bool], str]
_IS_COMPRESSED = "compressed-tensors"

_RULES: tuple[Rule, ...] = (
    ((TRANSFORMERS,), lambda f: f.lacks_shared,
        "fills the shared experts with random numbers and reports missing keys: no file holds one"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.one_by_one and f.fused_only,
        "leaves the experts at random numbers, without an error: it reads no experts one by one in this family"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.all_are("nvfp4"),
        "computes wrong numbers without an error: it drops weight_global_scale"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.mixed and f.all_are("fp8"),
        "computes wrong numbers without an error: plain experts beside fp8 ones stay uninitialised"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.mixed and not f.all_are("fp8", "nvfp4"),
        "raises: all experts must be stored alike"),
    ((TRANSFORMERS,), lambda f: f.method == "fp8" and f.mixed, "raises: all experts of a layer must be fp8 or none"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.other_layers and f.all_are("int4", "mxfp4"),
        "raises: plain MoE layers beside quantised ones"),
    ((TRANSFORMERS,), lambda f: f.method == _IS_COMPRESSED and f.zero_points,
        "raises: no zero points in experts"),
    ((TRANSFORMERS,), lambda f: f.kind in ("int-quantized", "mxfp8-quantized") or (
        f.method == _IS_COMPRESSED and f.all_are("fp8_block")), "raises: it cannot decompress these experts"),
    ((TRANSFORMERS,), lambda f: f.static, "computes without the static scales of activations (input_scale unused)"),
    ((VLLM, SGLANG), lambda f: f.mixed or not f.splits,
        "has one format per layer: gate, up and down of every expert must be stored alike"),
    ((VLLM, SGLANG), lambda f: f.all_are("fp8_block") and f.d_ff % 128 != 0,
        "raises: the experts' width is no multiple of 128"),
    ((VLLM,), lambda f: f.all_are("nvfp4") and f.scales_differ, "computes up with the global scale of gate"),
    ((VLLM, SGLANG), lambda f: f.all_are("fp8_tensor") and f.scales_differ,
        "requantises gate or up to the larger of their scales, which rounds again"),
    ((VLLM, SGLANG), lambda f: f.static and f.all_are("fp8_channel"),
        "raises: static activations go with one scale per tensor"),
    ((VLLM, SGLANG), lambda f: f.kind == "float-quantized" and f.weight_only,
        "raises: fp8 experts need quantised activations, such as dynamic ones per token"),
    ((SGLANG,), lambda f: f.kind in ("mxfp4-pack-quantized", "mxfp8-quantized"), "raises on GPUs: no such experts"),
    ((VLLM, SGLANG), lambda f: f.all_are("bitsandbytes int8"), "has no int8 experts of bitsandbytes"),
    ((SGLANG,), lambda f: f.kind == "pack-quantized" and f.zero_points,
        "raises: it has zero points of experts turned, and loads them as stored"),
    ((SGLANG,), lambda f: f.kind == "int-quantized", "raises on GPUs: W8A8 int8 experts run on NPUs only"),
)  # fmt: skip


def misreadings(facts: Facts) -> Iterator[tuple[str, str]]:
    """(loader, what it does) of one layer."""
    for loaders, applies, effect in _RULES:
        if applies(facts):
            yield from ((loader, effect) for loader in loaders)


def replaced(family: str) -> bool:
    """True where transformers puts modules of single experts into a fused family."""
    return family in _REPLACED
