"""`moe_torch.transformers.use`: what it counts, refuses and applies; autocast."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch.transformers
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.tuning import TileConfig, Tuning
from moe_torch.transformers import experts
from tests.support.torch import in_flat_buffer, on_engines, require_equal, running_on
from tools.sweep import models

_OUTSIDE = ("llama4", "longcat_flash", "step3p7", "jetmoe", "doge", "dbrx", "switch_transformers")


def build(family: str, device: Any = "cpu") -> Any:
    if family not in models.families():
        pytest.skip(f"this transformers has no {family}")
    return models.build(family).to(device)


def tokens(device: Any = "cpu") -> Any:
    return (torch.arange(24, device=device).reshape(2, 12) * 5 + 1) % 32


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "inkling", "qwen3_vl_moe"])
def test_every_experts_module_is_counted_and_set(family: str) -> None:
    model = build(family)
    report = moe_torch.transformers.use(torch.nn.Sequential(model))
    wanted = [f"0.{path}" for path, module in model.named_modules() if hasattr(module, "is_transposed")]
    assert wanted
    assert list(report.modules) == wanted
    assert str(report).startswith(f"{len(wanted)} experts modules")
    assert report.options == experts.ExpertsOptions(), "experts without use have the same defaults"
    assert all(model.get_submodule(path[2:]).config._experts_implementation == "moebius" for path in wanted)


@pytest.mark.parametrize("family", _OUTSIDE)
def test_experts_outside_the_interface_are_refused_at_once(family: str) -> None:
    with pytest.raises(Unsupported, match=r"got \w+\.[\w.]+ \(\w+\): transformers computes it outside"):
        moe_torch.transformers.use(build(family))


def test_unsupported_experts_are_named_and_nothing_changes() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(Unsupported, match=r"model.layers.1.mlp.experts \(MixtralExperts\): .*activates by Tanh"):
        moe_torch.transformers.use(model)
    assert model.config._experts_implementation != "moebius"


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidInput, match="model must have experts, got a Linear"):
        moe_torch.transformers.use(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="model must be a Module, got str"):
        moe_torch.transformers.use("mixtral")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="recompute must be"):
        moe_torch.transformers.use(build("mixtral"), recompute=1)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="no recompute or main_grad"):
        moe_torch.transformers.use(build("muse_spark"), recompute=True)
    # Older releases do not say whether experts have a norm.
    experts._require_options(object(), experts.ExpertsOptions(recompute=True), is_frozen=False)


def test_options_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    own = experts.moe_request

    def spied(x: Any, weights: Any, routing: Any, spec: Any) -> Any:
        seen.append(spec)
        return own(x, weights, routing, spec)

    monkeypatch.setattr(experts, "moe_request", spied)
    with running_on("reference"):
        model = build("mixtral").requires_grad_(False)
        plain = model(tokens()).logits
        for name, value in {"recompute": True, "allow_tf32": True, "tuning": Tuning(batch_invariant=True)}.items():
            moe_torch.transformers.use(model, **{name: value})
            seen.clear()
            torch.testing.assert_close(model(tokens()).logits, plain, rtol=1e-4, atol=1e-4)
            assert [getattr(spec, name) for spec in seen] == [value] * 2
        moe_torch.transformers.use(model, batch_invariant=True)
        whole = model.model.layers[0].mlp.experts
        seen.clear()
        compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="aot_eager", fullgraph=True)
        require_equal(compiled(tokens()), model(tokens(), use_cache=False).logits, "compiled with options")
        assert whole.moebius_options.tuning.batch_invariant
        assert all(spec.batch_invariant for spec in seen)


def test_options_reach_both_products_of_normalised_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    multiply = moe_torch.ops.matmul_ogs
    monkeypatch.setattr(moe_torch.ops, "matmul_ogs", lambda *call: seen.append(call[2]) or multiply(*call))
    tuning = Tuning(TileConfig(16, 16, 16), TileConfig(32, 16, 16))
    with running_on("reference"):
        model = build("muse_spark")
        moe_torch.transformers.use(model, tuning=tuning, allow_tf32=True)
        model(tokens())
    assert seen and [one.tuning for one in seen] == [tuning.of_product(1), tuning.of_product(2)] * (len(seen) // 2)
    assert all(one.allow_tf32 for one in seen)


@on_engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_autocast_computes_in_its_dtype(family: str, dtype: Any, engine: str) -> None:
    """As with weights of that dtype, and gradients arrive in the parameters' own."""
    with running_on(engine) as device:
        experts = next(module for module in build(family, device).modules() if hasattr(module, "is_transposed"))
        experts.config._experts_implementation = "moebius"
        moe_torch.transformers.register()
        torch.manual_seed(0)
        x = torch.randn(6, models.D, device=device)
        ids = torch.stack([torch.randperm(models.E)[: models.K] for _ in range(6)]).to(device)
        weights = torch.rand(6, models.K, device=device)
        with torch.autocast(torch.device(device).type, dtype):
            actual = experts(x, ids, weights)
            from_half = experts(x.to(dtype), ids, weights)
        assert actual.dtype == dtype
        actual.float().square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        require_equal(from_half.detach(), actual.detach(), "x in either dtype")
        with torch.no_grad():
            require_equal(actual.detach(), experts.to(dtype)(x.to(dtype), ids, weights), "autocast")


class _Operations(TorchDispatchMode):
    """The names of all operations, ours and torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_engines
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_one_operation_on_what_the_router_gives(engine: str, family: str) -> None:
    """Its ids are int64 and its weights often bf16: casts would be operations of their own."""
    with running_on(engine) as device, torch.no_grad():
        model = build(family, device).bfloat16()
        moe_torch.transformers.use(model)
        given: list[Any] = []
        own = next(module for module in model.modules() if hasattr(module, "is_transposed"))
        hook = own.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
        model(tokens(device))
        hook.remove()
        x, ids, weights = given
        assert ids.dtype == torch.int64
        with _Operations() as seen:
            found = own(x, ids, weights)
        assert seen.names == ["moebius.moe.top_k"]
        require_equal(found, own(x, ids.int(), weights.float()), "cast first")
        require_equal(own(x, ids, weights.bfloat16()), own(x, ids, weights.bfloat16().float()), "bf16 weights")
        assert torch.equal(own(x, ids + 2**32, weights), torch.zeros_like(x))


def test_a_view_of_a_flat_buffer_is_refused_before_anything_changes() -> None:
    """ZeRO, FSDP1 and Megatron keep parameters in one buffer: copies of misaligned ones would never be trained."""
    model = build("qwen3_moe")
    in_flat_buffer(model, offset=1)
    before = {name: one.data_ptr() for name, one in model.named_parameters()}
    with pytest.raises(InvalidInput, match=r"gate_up_proj must start at a multiple of 16 bytes, got a view of"):
        moe_torch.transformers.use(model)
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == before
    assert model.config._experts_implementation != "moebius"


def test_float64_experts_take_weights_in_float32_and_run_without_data() -> None:
    model = build("qwen3_moe").double()
    moe_torch.transformers.use(model)
    experts = next(module for module in model.modules() if hasattr(module, "is_transposed"))
    with running_on("reference"):
        y = experts(torch.ones(3, models.D, dtype=torch.float64), torch.zeros(3, 2).long(), torch.ones(3, 2))
    assert y.dtype == torch.float64
    model.to("meta")
    with torch.device("meta"):
        rows, chosen = torch.empty(3, model.config.hidden_size, dtype=torch.float64), torch.zeros(3, 2)
        assert experts(rows, chosen.long(), chosen).is_meta
