"""MoE layers of real models."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.specs.matmul import Activation
from moe_core.specs.routing import RouterSpec

_SILU = Activation("silu")
_SWIGLU_OAI = Activation("swiglu_oai", gate_layout="interleaved")


@dataclass(frozen=True)
class Shape:
    """One layer: D, F, E, K as everywhere, its activation, whether its experts have biases, and its router."""

    name: str
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    activation: Activation
    biased: bool

    @property
    def router(self) -> RouterSpec:
        return RouterSpec(self.top_k, order="topk_then_softmax")

    def flops(self, tokens: int) -> int:
        """Floating-point operations of both matmuls: 2 per multiply-add, 3 * D * F weights per slot."""
        return 2 * tokens * self.top_k * 3 * self.d_model * self.d_ff

    def weight_bytes(self, active_experts: int, itemsize: int = 2) -> int:
        """Bytes of the weights of the experts that have tokens."""
        return active_experts * 3 * self.d_model * self.d_ff * itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gptoss120b", 2880, 2880, 128, 4, _SWIGLU_OAI, True),
        Shape("gptoss20b", 2880, 2880, 32, 4, _SWIGLU_OAI, True),
        Shape("qwen3", 2048, 768, 128, 8, _SILU, False),
        Shape("mixtral", 4096, 14336, 8, 2, _SILU, False),
        Shape("dsv3", 7168, 2048, 256, 8, _SILU, False),
    )
}
#: GLM-4.5-Air, in the benchmark of expert parallelism alone.
GLM45AIR = Shape("glm45air", 4096, 1408, 128, 8, _SILU, False)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
