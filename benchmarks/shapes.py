"""MoE layers of real models."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.specs.matmul import Activation
from moe_core.specs.routing import RouterSpec

_SILU = Activation("silu")
_SWIGLU_OAI = Activation("swiglu_oai", gate_layout="interleaved")


@dataclass(frozen=True)
class Shape:
    """One layer: D, F, E, K as everywhere, its activation, whether its experts have biases, its router, and the layout
    in which its checkpoints store the experts."""

    name: str
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    activation: Activation
    biased: bool
    weight_layout: str = "out_in"

    @property
    def router(self) -> RouterSpec:
        return RouterSpec(self.top_k, order="topk_then_softmax")

    def matrices(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of gate_up and down in the weight layout: `[E, D, 2F]` and `[E, F, D]` of in_out."""
        width = self.activation.input_width(self.d_ff)
        inside_out = ((self.d_model, width), (self.d_ff, self.d_model))
        first, second = (size if self.weight_layout == "in_out" else size[::-1] for size in inside_out)
        return (self.num_experts, *first), (self.num_experts, *second)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of both matmuls: 2 per multiply-add, 3 * D * F weights per slot."""
        return 2 * tokens * self.top_k * 3 * self.d_model * self.d_ff

    def weight_bytes(self, active_experts: int, itemsize: int = 2) -> int:
        """Bytes of the weights of the experts that have tokens."""
        return active_experts * 3 * self.d_model * self.d_ff * itemsize


#: Those of every record.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gptoss120b", 2880, 2880, 128, 4, _SWIGLU_OAI, True, "in_out"),
        Shape("gptoss20b", 2880, 2880, 32, 4, _SWIGLU_OAI, True, "in_out"),
        Shape("qwen3", 2048, 768, 128, 8, _SILU, False),
        Shape("mixtral", 4096, 14336, 8, 2, _SILU, False),
        Shape("dsv3", 7168, 2048, 256, 8, _SILU, False),
    )
}
#: All that have a name: in a record where they are asked for. Those with `tp` are one rank's part of qwen3, and that
#: with `silu` is gpt-oss-120b as peers without its activation and biases take it.
ALL_SHAPES = SHAPES | {
    shape.name: shape
    for shape in (
        Shape("gptoss120bsilu", 2880, 2880, 128, 4, _SILU, False),
        Shape("olmoe", 2048, 1024, 64, 8, _SILU, False),
        Shape("qwen3next", 2048, 512, 512, 10, _SILU, False),
        Shape("glm45air", 4096, 1408, 128, 8, _SILU, False),
        Shape("phimoe", 4096, 6400, 16, 2, _SILU, False),
        Shape("llama4", 5120, 8192, 16, 1, _SILU, False, "in_out"),
        Shape("granite", 1536, 512, 40, 8, _SILU, False),
        Shape("kimik2", 7168, 2048, 384, 8, _SILU, False),
        Shape("qwen3tp2", 2048, 384, 128, 8, _SILU, False),
        Shape("qwen3tp4", 2048, 192, 128, 8, _SILU, False),
    )
}
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
#: Those between, and one beyond.
ALL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
