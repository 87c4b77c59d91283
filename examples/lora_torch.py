"""LoRA on a frozen Mixture-of-Experts layer in PyTorch: every expert has adapters on both of its products.

    pre = x W1 + s (x A1) B1        hidden = activation(pre)        y = hidden W2 + s (hidden A2) B2

Built of stage ops over one layout: a product of adapters is a grouped matmul as the frozen one is, and the gradients of
frozen weights are not computed. All of the ops have gradients, so that a router could be trained along. The frozen
weights may be quantised (QLoRA): gradients go through them to the adapters of the first product.

    python examples/lora_torch.py                          # plain weights, then mxfp4
    python examples/lora_torch.py --schemes int4_w4a16
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from moe_core.ops.quantize.reference import quantize
from moe_torch import (
    LogitsSpec,
    MatmulOperands,
    MatmulSpec,
    MoE,
    Scheme,
    activation,
    make_layout,
    matmul_ogs,
    reduce,
    route,
    router,
    scheme_named,
)

BATCH, D, F, E, K, RANK, SCALE = 64, 128, 128, 4, 2, 4, 2.0


def quantized(layer: MoE, scheme: Scheme) -> MoE:
    """The layer with the matrices of its experts in the format of a scheme."""
    weights = layer.export_weights()
    matrices = {"gate_up": weights.experts.gate_up, "down": weights.experts.down}
    packed = {
        name: quantize(matrix, scheme.weights, layout=weights.spec.weight_layout) for name, matrix in matrices.items()
    }
    experts = dataclasses.replace(weights.experts, **packed)
    return MoE.from_weights(dataclasses.replace(weights, experts=experts), device=layer.router.weight.device)


def refuse_what_is_left_out(layer: MoE) -> None:
    """Raise ValueError for a layer that has more than `LoRA.forward` computes: a bias, shared experts, ..."""
    spec, computed = layer.spec, ("d_model", "d_ff", "num_experts", "top_k", "router", "experts")
    others = [field for field in dataclasses.fields(spec) if field.name not in computed]
    found = [field.name for field in others if getattr(spec, field.name) != field.default]
    found += ["experts.bias"] if spec.experts.bias else []
    found += ["experts.gate_layout"] if spec.gated and layer.storage.gate_layout != "halves" else []
    scheme = spec.experts.scheme
    found += ["experts.scheme.activations"] if scheme is not None and scheme.activations is not None else []
    if found:
        raise ValueError(f"LoRA would ignore the layer's {', '.join(found)}; pass a layer without, or extend forward")


class LoRA(torch.nn.Module):
    """y `[T, D]` of x `[T, D]`: the layer, with adapters that change nothing at first. The layer is frozen."""

    def __init__(self, layer: MoE, rank: int, scale: float) -> None:
        super().__init__()
        refuse_what_is_left_out(layer)
        self.layer, self.scale = layer.requires_grad_(False), scale
        spec, weight = layer.spec, layer.router.weight
        width = spec.experts.activation.input_width(spec.d_ff)

        def adapter(inputs: int, outputs: int, std: float) -> torch.nn.Parameter:
            shape = (spec.num_experts, inputs, outputs)
            return torch.nn.Parameter(std * torch.randn(shape, device=weight.device, dtype=weight.dtype))

        self.gate_up_a, self.gate_up_b = adapter(spec.d_model, rank, spec.d_model**-0.5), adapter(rank, width, 0.0)
        self.down_a, self.down_b = adapter(spec.d_ff, rank, spec.d_ff**-0.5), adapter(rank, spec.d_model, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec, experts = self.layer.spec, self.layer.experts
        logits = router(x, self.layer.router.weight, spec=LogitsSpec(self.layer.storage.router_weight_layout))
        ids, weights = route(logits, spec.router)
        layout, weights = make_layout(ids, spec.num_experts), weights.flatten()
        frozen = self.layer.storage.weight_layout
        # A quantised matrix is a module of buffers.
        gate_up, down = (
            matrix if spec.experts.scheme is None else matrix.tensor() for matrix in (experts.gate_up, experts.down)
        )

        # From tokens to rows of experts. x A1 stays in rows, which is where B1 takes it from.
        low = matmul_ogs(MatmulOperands(x, self.gate_up_a), layout, MatmulSpec("in_out", gather="token"))
        change = matmul_ogs(MatmulOperands(low, self.gate_up_b), layout, MatmulSpec("in_out"))
        pre = matmul_ogs(MatmulOperands(x, gate_up), layout, MatmulSpec(frozen, gather="token"))
        hidden = activation(pre + self.scale * change, spec.experts.activation)

        # From rows back to slots, times the router's weight of each.
        low = matmul_ogs(MatmulOperands(hidden, self.down_a), layout, MatmulSpec("in_out"))
        operands = MatmulOperands(low, self.down_b, row_weight=weights)
        change = matmul_ogs(operands, layout, MatmulSpec("in_out", scatter="slot"))
        operands = MatmulOperands(hidden, down, row_weight=weights)
        y = matmul_ogs(operands, layout, MatmulSpec(frozen, scatter="slot"))
        return reduce(y + self.scale * change, layout)


def train(scheme: Scheme | None, device: str) -> None:
    """Teach a frozen layer what another one does to the same tokens. scheme: of the frozen weights, None = plain."""
    torch.manual_seed(0)
    layer, teacher = (MoE(D, F, E, K, device=device) for _ in range(2))
    layer = layer if scheme is None else quantized(layer, scheme)
    x = torch.randn(BATCH, D, device=device)
    with torch.no_grad():
        target = teacher(x)
    model = LoRA(layer, RANK, SCALE)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(model(x), layer(x), rtol=1e-4, atol=1e-5)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(tensor.nbytes for tensor in before.values())
    print(f"{scheme or 'plain'}: {sum(map(torch.numel, trained))} numbers are trained, {size} bytes are frozen")
    optimizer, losses = torch.optim.Adam(trained, 1e-2), []
    for step in range(20):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 5 == 0:
            print(f"step {step:2}: loss {losses[-1]:.4f}")
    print(f"step {step:2}: loss {losses[-1]:.4f}")
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items()), "frozen"
    print("the frozen weights are bitwise what they were")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=["plain", "mxfp4_w4a16"],
        help="of the frozen weights, one after the other: plain, mxfp4_w4a16, int4_w4a16, int8_w8a16, ...",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in parser.parse_args().schemes:
        train(None if name == "plain" else scheme_named(name), device)


if __name__ == "__main__":
    main()
