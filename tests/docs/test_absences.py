"""What the user's pages say is absent: each such sentence is called here, or named with the test that does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from flax import nnx

import moe_jax
import moe_jax.nnx
import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, LatentSpec, MoELayerSpec, OutputSpec
from moe_core.specs import NormSpec, RouterSpec, TokenRounding
from moe_torch import MoE, layer_spec_from_config
from moe_torch.modular import FusedMoEQuantConfig
from moe_torch.trace import LayerRouting, replay
from tests.support.paths import ROOT
from tests.support.torch import running_on

ABSENCE = re.compile(
    r"`Unsupported`|not supported|[Tt]here (is|are) no\b|\b(is|are) refused|have no gradient|no second derivative"
)
SPEC = MoELayerSpec(16, 24, 4, 2)
QUANTISED = MoELayerSpec(128, 128, 4, 2, experts=ExpertsSpec(scheme=scheme_named("fp8_block")))
ROUNDED = dataclasses.replace(SPEC, token_rounding=TokenRounding(tile=16))


def layer(spec: MoELayerSpec = SPEC, **options: Any) -> MoE:
    return MoE.from_spec(spec, **options)


def x(width: int = 16, **options: Any) -> Any:
    return torch.randn(3, width, **options)


def flax_layer(spec: MoELayerSpec = SPEC) -> Any:
    return moe_jax.nnx.MoE.from_spec(spec, rngs=nnx.Rngs(0))


def second_derivative() -> None:
    leaf = x(requires_grad=True)
    (first,) = torch.autograd.grad(layer()(leaf).square().sum(), leaf, create_graph=True)
    torch.autograd.grad(first.sum(), leaf)


def batched_gradients() -> None:
    made = layer()
    torch.func.vmap(torch.func.grad(lambda x: made(x[None]).sum()))(x())


def replayed_elsewhere() -> None:
    own = layer(dataclasses.replace(SPEC, router=RouterSpec(renormalize=True)))
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    with replay(LayerRouting(ids, None, 4)):
        moe_spec = dataclasses.replace(own.moe_spec, router=None)
        moe_torch.moe(x(), own.experts.operands(), moe_torch.TopK(ids, torch.ones(3, 2)), moe_spec)


def rounded(**options: Any) -> Callable[[], Any]:
    return lambda: dataclasses.replace(ROUNDED, **options)


def main_grad(**options: Any) -> Any:
    made = layer(dataclasses.replace(SPEC, main_grad=True))
    for parameter in made.parameters():
        attributes: Any = parameter
        attributes.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return made


def compiled_main_grad() -> None:
    try:
        torch.compile(main_grad(), backend="eager", fullgraph=True)(x(requires_grad=True))
    except torch._dynamo.exc.Unsupported as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


#: (page, part of its sentence, calls that raise what it says).
CLAIMS: list[tuple[str, str, list[Callable[[], Any]]]] = [
    ("layers.md", "Other model types, settings that no layer can compute", [
        lambda: layer_spec_from_config({"model_type": "nonesuch"}),
        lambda: layer_spec_from_config({"model_type": "mixtral", "hidden_size": 8, "hidden_act": "tanh",
            "intermediate_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}),
    ]),
    ("layers.md", "Other routers raise `Unsupported`", [replayed_elsewhere]),
    ("migration.md", "Quantised weights are frozen, and `main_grad` is refused for them", [
        lambda: dataclasses.replace(QUANTISED, main_grad=True),
    ]),
    ("modular.md", "`nvfp4_w4a4`, `int4_w4a8` and `mxfp6` raise `Unsupported`", [
        lambda: FusedMoEQuantConfig.make(quant_dtype="nvfp4"),
    ]),
    ("quantization.md", "Schemes that also quantise activations have no gradient", [
        lambda: layer(QUANTISED)(x(128, requires_grad=True)),
    ]),
    ("routing.md", "Experts on several ranks, groups with `topk_then_softmax`", [
        rounded(router=RouterSpec(num_groups=2, topk_group=1, order="topk_then_softmax")),
        rounded(router=RouterSpec(slot_order="expert")),
        rounded(latent=LatentSpec(8)),
        rounded(output=OutputSpec(NormSpec(1e-6), "experts")),
    ]),
    ("training.md", "Gradients inside `vmap`, compiled transforms, forward mode and second derivatives", [
        second_derivative,
        batched_gradients,
        lambda: torch.func.jvp(layer(), (x(),), (x(),)),
    ]),
    ("training.md", "Layers that also quantise activations have no gradient", [
        lambda: layer(QUANTISED)(x(128, requires_grad=True)),
    ]),
    ("training.md", "A compiled or transformed step raises `Unsupported`", [compiled_main_grad]),
]  # fmt: skip
#: Part of a sentence -> the test that calls it, because it needs ranks, GPUs, other packages or a long setting.
ELSEWHERE = {
    "tests/jax/test_higher_derivatives.py": ("They are slower than a gradient, and raise `Unsupported`",),
    "tests/checkpoint/test_errors.py": ("Other links are refused",),
    "tests/torch/layers/test_blocks.py": ("Routers that return no ids",),
    "tests/layers/test_routes.py": ("`moe_jax.nnx.MoE.from_weights` leaves it out",),
    "tests/jax/parallel/test_meshes.py": ("A tensor axis above 1 is refused",),
    "tools/upstream/megatron.py": ("Other options that change numbers, such as fp8 and a split",),
    "tests/compat/test_hub.py": ("modules raise `Unsupported` where a gradient",),
    "tests/torch/test_transformers_use.py": ("Unsupported options raise", "float64 raises `Unsupported`"),
    "tests/modular/test_surface.py": (
        "Batched experts and an overridden routing", "A required parameter of no generation", "Our other classes raise",
        "An override that `apply`", "mixed dtypes are refused", "Sizes without a kernel", "`shared_experts` raises",
        "`apply` raises `Unsupported`", "there are no gradients", "What cannot run raises `Unsupported` in `adapt`",
    ),
    "tests/modular/generations/test_vllm.py": (
        "With the configurations, `adapt` raises", "`nvfp4` and `mxfp8` weights", "modular.md raise `Unsupported` |",
    ),
    "tests/modular/test_deep_ep.py": ("a missing package `deep_ep`",),
    "tests/jax/parallel/__init__.py": ("parallel-jax.md",),
    "tests/torch/parallel/test_rebalance.py": ("Forwards that need a gradient, `fully_shard` around",),
    "tests/torch/parallel/test_transformers.py": ("Older versions raise", "with a norm of each expert's result, raise"),
    "tests/torch/parallel/peer/test_symmetric.py": ("every rank raises `Unsupported`",),
    "tests/torch/parallel/test_layers.py": ("`fully_shard` and sums over experts", "and so does `prepack_weights`"),
    "tests/torch/parallel/test_training.py": ("parallel-training.md",),
    "tests/recipes/test_peft_native.py": ("initial values that change the weights, such as PiSSA",),
    "tests/recipes/test_qwix.py": (
        "Other types and static scales", "Rules may name symmetric weights only",
        "Linen raises `Unsupported` for a rule",
    ),
    "tests/layers/test_prepack.py": ("a kernel for prepacked weights (`Unsupported`)",),
    "tests/torch/training/test_no_gradient.py": ("rounding has no gradient", "training.md", "quantization.md"),
    "tests/flax/test_training.py": ("`main_grad` raises `Unsupported`",),
}  # fmt: skip


def sentences() -> list[tuple[str, str]]:
    """(page, sentence) of every claim of an absence outside of code."""
    claims = []
    for page in sorted((ROOT / "docs/user").glob("*.md")):
        text = " ".join(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split())
        claims += [(page.name, part) for part in re.split(r"(?<=[.:|]) ", text) if ABSENCE.search(part)]
    return claims


def test_every_claim_has_a_test() -> None:
    """A new sentence belongs into CLAIMS, or to a test that calls what it denies. Names of pages stand for tables."""
    known = [claim for _, claim, _ in CLAIMS] + [part for parts in ELSEWHERE.values() for part in parts]
    new = [f"{page}: {text}" for page, text in sentences() if not any(part in f"{page} {text}" for part in known)]
    assert new == []
    assert [path for path in ELSEWHERE if not (ROOT / path).is_file()] == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("page", "claim", "calls"), CLAIMS, ids=[claim[:40] for _, claim, _ in CLAIMS])
def test_what_is_said_to_be_absent_is(page: str, claim: str, calls: list[Callable[[], Any]]) -> None:
    assert any(name == page and claim in text for name, text in sentences()), f"{page} has no such sentence"
    with running_on("reference"):
        for number, call in enumerate(calls):
            try:
                call()
            except (Unsupported, InvalidInput, TypeError):
                continue
            pytest.fail(f"call {number} works, and {page} says that it does not: {claim}")
