"""transformers' own mxfp4 modules on our ops, by one call, offline and on a CPU."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from moe_core.errors import Unsupported
from moe_torch import compat
from tests.support.torch import running_on
from tools.upstream.problems import complaint

pytest.importorskip("accelerate", reason="transformers quantises with accelerate")
from tools.upstream import transformers_cases

#: As it is without our modules.
THEIR_ROUTING: Any = getattr(importlib.import_module("transformers.integrations.mxfp4"), "routing_from_top_k", None)
if THEIR_ROUTING is None:
    pytest.skip("mxfp4 of the installed transformers has no routing_from_top_k", allow_module_level=True)
MODULES = ("integrations.hub_kernels", "integrations.mxfp4", "quantizers.quantizer_mxfp4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch, running_on("reference"), torch.no_grad():
        patch.setenv("HF_HUB_OFFLINE", "1")
        with compat.serve_transformers():
            yield transformers_cases.Models(tmp_path_factory.mktemp("models"), "cpu")


@pytest.mark.parametrize("name", transformers_cases.CASES)
def test_cases_of_upstream(name: str, models: transformers_cases.Models) -> None:
    for answer in transformers_cases.CASES[name](models):
        assert complaint(answer.actual, answer.expected, answer.bound) is None


def test_gradients_are_refused(models: transformers_cases.Models) -> None:
    x = models.given.x.clone().requires_grad_()
    with torch.enable_grad(), pytest.raises(Unsupported, match="no gradient"):
        models.quantized.model.layers[0].mlp(x[None])


def test_transformers_own_routing_runs_too(models: transformers_cases.Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where torch.histc takes integers."""
    histc = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **named: histc(x.float(), **named).to(x.dtype))
    experts, ids = models.quantized.model.layers[0].mlp.experts, models.given.ids.clone()
    ids[::3, 0], ids[1::3, 1] = experts.num_experts, -1
    found = experts.forward_routed(models.given.x, *THEIR_ROUTING(ids, models.given.weights, experts.num_experts))
    assert torch.equal(found, experts(models.given.x, ids, models.given.weights))


def test_everything_is_put_back_and_other_kernels_are_the_hubs() -> None:
    def held() -> list[dict[str, object]]:
        return [dict(vars(importlib.import_module(f"transformers.{name}"))) for name in MODULES]

    before = held()
    with compat.serve_transformers() as package:
        hub = sys.modules["transformers.integrations.hub_kernels"]
        assert hub.get_kernel("kernels-community/gpt-oss-triton-kernels", version=1) is package
        assert package.routing.routing and package.tensor_details.layout.StridedLayout and held() != before
        if before[0]["_kernels_enabled"] is False:
            with pytest.raises(ImportError):
                hub.get_kernel("kernels-community/another")
    assert held() == before


def test_a_transformers_without_the_integration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
    monkeypatch.delattr(mxfp4, "routing_from_top_k")
    with pytest.raises(Unsupported, match="routing_from_top_k"):
        compat.serve_transformers()


def test_ids_outside_of_the_experts_get_no_row() -> None:
    """As transformers counts them: -1 and everything from num_experts on."""
    with compat.serve_transformers():
        mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
        ids, weights = torch.tensor([[3, -1], [1, 0], [0, 7]]), torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
        data, gather, scatter = mxfp4.routing_from_top_k(ids, weights, 3)
    assert data.expt_hist.tolist() == [2, 1, 0] and data.n_expts_act == 2
    torch.testing.assert_close(data.gate_scal[:3], torch.tensor([0.4, 0.5, 0.3]))
    assert gather.src_indx[:3].tolist() == [2, 4, 3] and scatter.src_indx.tolist() == [-1, -1, 0, 2, 1, -1]
