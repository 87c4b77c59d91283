"""LoRA on a frozen Mixture-of-Experts layer in PyTorch: trained, then served beside another adapter in one batch.

The frozen weights may be quantised (QLoRA): they stay codes, and gradients go through them.

    python examples/lora_torch.py                          # plain weights, then mxfp4
    python examples/lora_torch.py --schemes int4_w4a16
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from moe_core.ops.quantize.reference import quantize
from moe_torch import LoRA, MoE, Scheme, scheme_named

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

    # Serve: a copy of the adapter at half strength in slot 1, and tokens of both and of none in one batch.
    adapter = lora.export(0)
    lora.load(1, dataclasses.replace(adapter, scale=adapter.scale / 2))
    ids = torch.arange(BATCH, dtype=torch.int32, device=device) % 3 - 1
    with torch.no_grad():
        mixed = layer(x, adapter_ids=ids)
        alone = [layer(x, adapter_ids=torch.full_like(ids, slot)) for slot in (-1, 0, 1)]
    for slot, y in zip((-1, 0, 1), alone, strict=True):
        torch.testing.assert_close(mixed[ids == slot], y[ids == slot], rtol=1e-4, atol=1e-5)
    print("one batch serves both adapters and tokens without one")


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
