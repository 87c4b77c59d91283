"""LoRA on a frozen Mixture-of-Experts layer in PyTorch: trained, then eight adapters served in one decode loop.

The frozen weights may be quantised (QLoRA): they stay codes, and gradients go through them.

    python examples/lora_torch.py                          # plain weights, then mxfp4
    python examples/lora_torch.py --schemes int4_w4a16
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from moe_core.ops.quantize.reference import quantize
from moe_torch import LoRA, LoRAFactors, MoE, Scheme, scheme_named

BATCH, D, F, E, K, RANK, ALPHA = 64, 128, 128, 4, 2, 4, 8.0


def quantized(layer: MoE, scheme: Scheme) -> MoE:
    """The layer with the matrices of its experts in the format of a scheme."""
    weights = layer.export_weights()
    matrices = {"gate_up": weights.experts.gate_up, "down": weights.experts.down}
    packed = {
        name: quantize(matrix, scheme.weights, layout=weights.spec.weight_layout) for name, matrix in matrices.items()
    }
    experts = dataclasses.replace(weights.experts, **packed)
    return MoE.from_weights(dataclasses.replace(weights, experts=experts), device=layer.router.weight.device)


def train(scheme: Scheme | None, device: str) -> None:
    """Teach a frozen layer what another one does to the same tokens. scheme: of the frozen weights, None = plain."""
    torch.manual_seed(0)
    layer, teacher = (MoE(D, F, E, K, device=device) for _ in range(2))
    layer = layer if scheme is None else quantized(layer, scheme)
    x = torch.randn(BATCH, D, device=device)
    with torch.no_grad():
        target, base = teacher(x), layer(x)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    # The slots of a server hold several adapters. Slot 0 is trained.
    lora = layer.add_lora(LoRA(RANK, alpha=ALPHA, slots=2))
    lora.reset(0)
    first = torch.zeros(BATCH, dtype=torch.int32, device=device)
    with torch.no_grad():
        assert torch.equal(layer(x, adapter_ids=first), base), "a new adapter changes nothing"

    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    size = sum(tensor.nbytes for tensor in before.values())
    print(f"{scheme or 'plain'}: {sum(map(torch.numel, trained))} numbers are in slots, {size} bytes are frozen")
    optimizer, losses = torch.optim.Adam(trained, 1e-2), []
    for step in range(20):
        loss = (layer(x, adapter_ids=first) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 5 == 0:
            print(f"step {step:2}: loss {losses[-1]:.4f}")
    print(f"step {step:2}: loss {losses[-1]:.4f}")
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    after = layer.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "frozen"
    print("the frozen weights are bitwise what they were")


def serve(device: str) -> None:
    """Decode with eight adapters in one batch. Between two steps of one graph an adapter leaves and another comes."""
    torch.manual_seed(0)
    layer = MoE(D, F, E, K, device=device)
    slots = layer.eval().add_lora(LoRA(RANK, alpha=ALPHA, slots=8, max_rank=16))
    shapes = {"a1": (D, RANK), "b1": (RANK, 2 * F), "a2": (F, RANK), "b2": (RANK, D)}

    def adapter() -> LoRAFactors:
        return LoRAFactors(**{name: 0.3 * torch.randn(E, *shape, device=device) for name, shape in shapes.items()})

    for slot in range(8):
        slots.load(slot, adapter())
    x, ids = torch.randn(16, D, device=device), torch.arange(16, dtype=torch.int32, device=device) % 8
    with torch.no_grad():
        y, run = layer(x, adapter_ids=ids), None
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x, adapter_ids=ids)
            run = graph.replay
        for step in range(4):
            if step == 1:
                slots.evict(3)
            if step == 2:
                slots.load(3, adapter())
            if run is not None:
                run()
            else:
                y = layer(x, adapter_ids=ids)
            alone = layer(x, adapter_ids=torch.where(ids == 3, ids, -1))
            torch.testing.assert_close(y[ids == 3], alone[ids == 3], rtol=1e-4, atol=1e-5)
            x.copy_(x + torch.tanh(y))  # in place of the rest of a model
    print(f"8 adapters served in one batch{', replaced under a CUDA graph' if run else ''}")


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
    serve(device)


if __name__ == "__main__":
    main()
