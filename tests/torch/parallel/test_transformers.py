"""Models of transformers whose experts lie on several gloo ranks: logits and gradients are those of one process."""

from __future__ import annotations

import os
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23")

import torch
import transformers

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge.private import SUBCLASSES_OF_DTENSOR
from moe_torch.transformers import register
from moe_torch.transformers.experts import OPTIONS, ExpertsOptions
from moe_torch.transformers.parallel import DistributedConfig, MoebiusEP, expert_parallel
from tests.support.parallel.pool import Pool
from tests.support.torch import running_on
from tools.sweep.models import build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would take a GPU for every rank")

FAMILIES = ("mixtral", "gpt_oss")
IDS = torch.arange(14).view(2, 7) % 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        build(family).save_pretrained(folder / family)
    return str(folder)


@pytest.fixture(scope="module", params=(2, 4))
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pytest.importorskip("accelerate", reason="transformers loads onto ranks with accelerate")
    pool = Pool(request.param)
    yield pool
    pool.close()


def load(path: pathlib.Path, **options: Any) -> Any:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    register()
    return transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="moebius", **options)


def results(model: Any) -> dict[str, np.ndarray]:
    """Logits, and the gradients of all experts and routers."""
    with running_on("reference"):
        logits = model(IDS).logits
        logits.float().square().sum().backward()
    found = {"logits": logits}
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            gradient = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return {name: array.detach().float().numpy() for name, array in found.items()}


def run(group: Any, folder: str, family: str, dtype: torch.dtype, options: dict[str, Any] | None) -> Any:
    """What one rank computes; options: of DistributedConfig, None = experts over ranks on Moebius."""
    size = torch.distributed.get_world_size(group)
    rank = str(torch.distributed.get_rank(group))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size)}
    path = pathlib.Path(folder) / family
    config = expert_parallel(transformers.AutoConfig.from_pretrained(path), size)
    if options is not None:
        config = DistributedConfig(tp_size=size, **{"tp_plan": config.tp_plan} | options)
    return results(load(path, dtype=dtype, distributed_config=config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_over_ranks_is_that_of_one_process(ranks: Pool, models: str, family: str, dtype: torch.dtype) -> None:
    alone = results(load(pathlib.Path(models) / family, dtype=dtype))
    for found in ranks.call(run, [(models, family, dtype, None)] * len(ranks.pipes)):
        assert found.keys() == alone.keys()
        for name, array in alone.items():
            np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.parametrize("plan", ["all_to_all", "all_reduce", "tensor"])
def test_plans_of_transformers_take_our_experts(ranks: Pool, models: str, plan: str) -> None:
    if plan == "tensor" and len(ranks.pipes) == 4:
        pytest.skip("the model's two heads of keys are no four")
    if plan == "tensor" and not SUBCLASSES_OF_DTENSOR:
        pytest.skip("torch before 2.12 gathers no interleaved shards")
    options = {"ep_size": len(ranks.pipes), "ep_implementation": plan}
    if plan == "tensor":
        options = {"tp_plan": None}
    alone = results(load(pathlib.Path(models) / "mixtral"))
    for found in ranks.call(run, [(models, "mixtral", torch.float32, options)] * len(ranks.pipes)):
        np.testing.assert_allclose(found["logits"], alone["logits"], 1e-4, 1e-5)


def test_what_cannot_run_is_refused_by_name(models: str) -> None:
    config = transformers.AutoConfig.from_pretrained(pathlib.Path(models) / "mixtral")
    experts = load(pathlib.Path(models) / "mixtral").model.layers[0].mlp.experts
    mesh: Any = None
    with pytest.raises(Unsupported, match="cannot run Linear, which does not go through"):
        MoebiusEP(torch.nn.Linear(2, 2), mesh, mesh)
    with pytest.raises(
        InvalidInput, match="ep_plan must share out every parameter of MixtralExperts by 'grouped_gemm'"
    ):
        MoebiusEP(experts, mesh, mesh)
    experts.has_post_expert_norm = True
    with pytest.raises(Unsupported, match="MixtralExperts, which normalises what each expert returns"):
        MoebiusEP(experts, mesh, mesh)
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(Unsupported, match="activates by Tanh"):
        MoebiusEP(experts, mesh, mesh)
    given: Any = types.SimpleNamespace(experts=types.SimpleNamespace(**{OPTIONS: ExpertsOptions(main_grad=True)}))
    with pytest.raises(Unsupported, match="main_grad cannot be had across ranks"):
        MoebiusEP.__call__(given, *[torch.zeros(1, 1)] * 3)
    made = expert_parallel(config, 2)
    assert (made.tp_size, made.ep_size) == (2, 2)
    config.base_model_ep_plan = None
    with pytest.raises(
        InvalidInput, match="config must be of a model with an ep_plan and a tp_plan, got MixtralConfig"
    ):
        expert_parallel(config, 2)
