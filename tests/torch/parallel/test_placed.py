"""Parameters of experts in any order: what runs on a rank's part, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.parallel import PlacedTensor, Placement

PLACEMENT = Placement.round_robin(5, 2)
WHOLE = torch.arange(10.0).view(5, 2)


def part(rank: int = 1, placement: Placement = PLACEMENT) -> PlacedTensor:
    """A rank's part of WHOLE, without a group: only `full_tensor` needs one."""
    own = [expert for expert in placement.owners[rank] if expert >= 0]
    return PlacedTensor(WHOLE[own], (None, rank, placement))


def test_elementwise_operations_run_on_a_ranks_part() -> None:
    placed = part()
    assert placed.shape == (5, 2) and placed.held == [1, 3] and repr(placed).startswith("PlacedTensor([5, 2], torch")
    total = placed + 2 * placed
    assert isinstance(total, PlacedTensor) and total.to_local().tolist() == [[6, 9], [18, 21]]
    out = torch.empty_like(placed)
    assert torch.mul(placed, 3, out=out) is out and torch.equal(out.to_local(), total.to_local())
    placed.add_(torch.tensor(1.0)).mul_(total)
    assert placed.to_local().tolist() == [[18, 36], [126, 168]]
    assert placed.bfloat16().dtype == torch.bfloat16 and placed.clone().held == [1, 3]
    assert placed.copy_(WHOLE).to_local().tolist() == [[2, 3], [6, 7]]


def test_gradients_of_a_part() -> None:
    placed = torch.nn.Parameter(part())
    (placed.to_local().square().sum() / 2).backward()
    gradient = placed.grad
    assert isinstance(gradient, PlacedTensor) and torch.equal(gradient.to_local(), WHOLE[[1, 3]])


def test_what_would_mix_experts_up_is_refused() -> None:
    placed = part()
    for call in (placed.sum, lambda: placed[0], lambda: placed @ placed.T, lambda: placed.split(1), placed.normal_):
        with pytest.raises(Unsupported, match=r"cannot be had of experts in the order of a placement \(5 experts on 2"):
            call()
    with pytest.raises(InvalidInput, match="both arrays must have one placement"):
        placed + part(0)
    with pytest.raises(InvalidInput, match=r"arrays beside PlacedTensor.* must have its placement, got Tensor"):
        placed + WHOLE
