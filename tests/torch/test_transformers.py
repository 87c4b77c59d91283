"""Models of transformers with their experts on Moebius, against the same models with eager experts."""

from __future__ import annotations

import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch.transformers
from moe_core.errors import Unsupported
from tests.support.torch import mapped, on_engines, require_equal, running_on
from tools.sweep import models
from tools.sweep.models import D, E, F, K

T = 6
#: The published limits are never met by small numbers: these are.
_CLAMPED = {"swiglu_limit": 0.75, "swiglu_alpha": 1.5}
MODELS: dict[str, dict[str, Any]] = {"mixtral": {}, "qwen3_moe": {}, "gpt_oss": _CLAMPED, "deepseek_v3": {}}
on_models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """Registered, and transformers quiet."""
    moe_torch.transformers.register()
    moe_torch.transformers.register()
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    log.set_verbosity(verbosity)
    log.enable_progress_bar()


def scatter(module: Any) -> None:
    """Random parameters of a size that makes every part count."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.5 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5)


def build(name: str, device: Any = "cpu", dtype: Any = torch.float32) -> Any:
    """A small random model with its experts on Moebius."""
    model = models.build(name, **MODELS[name])
    model.set_experts_implementation("moebius")
    assert model.config._experts_implementation == "moebius"
    return model.requires_grad_(False).to(device, dtype)


def tokens(device: Any) -> Any:
    return (torch.arange(2 * T, device=device).reshape(2, T) * 5 + 1) % 32


def eager(model: Any, function: Any) -> Any:
    """The function's result with the model's own experts."""
    model.set_experts_implementation("eager")
    result = function()
    model.set_experts_implementation("moebius")
    return result


def require_close(actual: Any, wanted: Any) -> None:
    """Float32 logits of rms about 1 whose sums differ in order only."""
    torch.testing.assert_close(actual, wanted, rtol=2e-5, atol=2e-5)


@on_engines
@on_models
def test_logits_and_generated_tokens_match_eager_experts(engine: str, name: str) -> None:
    with running_on(engine) as device:
        model, ids = build(name, device), tokens(device)
        require_close(model(ids).logits, eager(model, lambda: model(ids).logits))
        greedy = {"max_new_tokens": 3, "do_sample": False}
        written = model.generate(ids[:1], **greedy)
        assert written.shape == (1, T + 3)
        torch.testing.assert_close(written, eager(model, lambda: model.generate(ids[:1], **greedy)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_compiled_forward(name: str) -> None:
    """No graph break, the operator in the graph, eager's logits, and no second compilation of an unchanged call."""
    with running_on("reference") as device:
        model, ids = build(name, device), tokens(device)
        wanted = eager(model, lambda: model(ids).logits)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend=counter, fullgraph=True)
        require_close(compiled(ids), wanted)
        require_close(compiled(ids), wanted)
        assert counter.frame_count == 1
        called = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
        assert called.count(torch.ops.moebius.moe.top_k) == (1 if name == "deepseek_v3" else 2)


@on_engines
def test_bfloat16_within_its_dtype(engine: str) -> None:
    """Both round in places of their own: neither is far from the same weights in float32."""
    with running_on(engine) as device:
        experts, inputs = build("gpt_oss", device, torch.bfloat16).model.layers[0].mlp.experts, routed(device)
        x, ids, weights = inputs
        actual = experts(x.bfloat16(), ids, weights.bfloat16())
        assert actual.dtype == torch.bfloat16
        exact = experts.float()(x.bfloat16().float(), ids, weights.bfloat16().float())
        assert float((actual.float() - exact).norm() / exact.norm()) < 2**-7


def routed(device: Any) -> tuple[Any, Any, Any]:
    """hidden_states, top_k_index and top_k_weights for an experts module."""
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return tuple(tensor.to(device) for tensor in (torch.randn(T, D), ids, torch.rand(T, K)))  # type: ignore[return-value]


#: (model, class of experts, settings): every layout, flag and gate that is supported.
EXPERTS = {
    "concatenated": ("mixtral", "MixtralExperts", {"hidden_act": "gelu"}),
    "concatenated_tanh": ("gemma4", "Gemma4TextExperts", {"hidden_activation": "gelu_pytorch_tanh"}),
    "function": ("lfm2_moe", "Lfm2MoeExperts", {}),
    "transposed": ("aria", "AriaExperts", {}),
    "transposed_interleaved_bias": ("gpt_oss", "GptOssExperts", _CLAMPED),
    "transposed_halves_bias": ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", _CLAMPED),
    "concatenated_clamped": ("minimax_m3_vl", "MiniMaxM3VLExperts", _CLAMPED),
    "ungated": ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "relu2"}),
    "plain_gate_of_its_own": ("beam", "BeamExperts", {}),
    "clamped_silu": ("deepseek_v4", "DeepseekV4Experts", _CLAMPED),
    "clamped_gelu": ("deepseek_v4", "DeepseekV4Experts", {"swiglu_limit": 0.5, "hidden_act": "gelu"}),
    "clamped_silu_glm": ("glm5_next", "Glm5NextTextExperts", _CLAMPED),
    "clamped_silu_hy": ("hy_v4", "HYV4Experts", _CLAMPED),
    "softcapped_silu": ("inkling2", "Inkling2Experts", {"mlp_gate_softcap": 0.5, "mlp_up_softcap": 0.75}),
    "norm": ("muse_spark", "MuseSparkExperts", {"post_norm_eps": 1e-6, "moe_hidden_size": D}),
    "own_activation": ("mixtral", "MixtralExperts", {"hidden_act": "quick_gelu"}),
}
REFUSED = {"own_activation": "MixtralExperts, which activates by QuickGELUActivation"}


def build_experts(kind: str, device: Any = "cpu") -> Any:
    """An experts module alone; skipped where this transformers has no such model yet."""
    model, name, settings = EXPERTS[kind]
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError as error:
        pytest.skip(f"transformers {transformers.__version__} has no {error.name}")
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    widths = ("intermediate_size", "moe_intermediate_size")
    sizes = dict.fromkeys(names, E) | dict.fromkeys(widths, F) | {"hidden_size": D, "hidden_act": "silu"}
    others = {"moe_latent_size": None, "mlp_bias": False, "top_k_experts": K, "num_experts_per_tok": K}
    config = SimpleNamespace(**sizes | others | settings, _experts_implementation="moebius")
    experts = getattr(module, name)(config)
    if not hasattr(experts, "is_transposed"):
        pytest.skip(f"transformers {transformers.__version__} computes {name} outside of its experts interface")
    scatter(experts)
    for attribute, value in (("limit", 0.75), ("alpha", 1.5)):
        if settings is _CLAMPED and hasattr(experts, attribute):
            setattr(experts, attribute, value)  # which transformers before 5.23 takes from no config
    return experts.requires_grad_(False).to(device)


@on_engines
@pytest.mark.parametrize("kind", [kind for kind in EXPERTS if kind not in REFUSED])
def test_every_layout_gate_and_bias(engine: str, kind: str) -> None:
    with running_on(engine) as device:
        experts, inputs = build_experts(kind, device), routed(device)
        actual = experts(*inputs)
        experts.config._experts_implementation = "eager"
        torch.testing.assert_close(actual, experts(*inputs), rtol=2e-5, atol=2e-5)


def test_experts_of_a_transformers_without_norms_of_results() -> None:
    """Before it had such experts, none had the flag."""
    with running_on("reference"):
        experts, inputs = build_experts("concatenated"), routed("cpu")
        wanted = experts(*inputs)
        del experts.has_post_expert_norm
        for options in ({}, {"recompute": True}):
            moe_torch.transformers.use(experts, **options)
            torch.testing.assert_close(experts(*inputs), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_experts_that_moebius_cannot_compute_are_refused(kind: str) -> None:
    with running_on("reference"), pytest.raises(Unsupported, match=REFUSED[kind]):
        build_experts(kind)(*routed("cpu"))


def test_another_implementation_runs_what_is_refused() -> None:
    """What the message of a refusal says."""
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K, "vocab_size": 32}
    config = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_act="quick_gelu"
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("moebius")
    tokens = torch.arange(6)[None]
    with running_on("reference"):
        with pytest.raises(Unsupported, match=r"model\.set_experts_implementation\('eager'\), or 'grouped_mm'"):
            model(tokens)
        model.set_experts_implementation("eager")
        assert model(tokens).logits.shape == (1, 6, 32)
        model.set_experts_implementation("grouped_mm")
        assert model(tokens).logits.shape == (1, 6, 32)


def test_contradicting_flags_are_refused() -> None:
    experts = build_experts("concatenated")
    experts.is_concatenated = False
    with pytest.raises(
        Unsupported, match=r"gates interleaved of its weights by _default_apply_gate, which is no activation"
    ):
        experts(*routed("cpu"))


def test_quantised_experts_are_refused() -> None:
    experts = build_experts("concatenated")
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(Unsupported, match=r"weights of torch.float8_e4m3fn, .* \(quantised\)"):
        experts(*routed("cpu"))


def without(monkeypatch: pytest.MonkeyPatch, module: str, replaced: dict[str, Any]) -> None:
    """Import a module anew, and what is below it, beside others in the place of those that there are."""
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, other in replaced.items():
        monkeypatch.setitem(sys.modules, name, other)
    importlib.import_module(module)


def test_a_missing_transformers_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
    with pytest.raises(Unsupported, match=r"transformers 5\.17 or later"):
        without(monkeypatch, "moe_torch.transformers", dict.fromkeys(names))


@pytest.mark.parametrize("there", [False, True], ids=["no module", "another module"])
def test_an_older_transformers_is_refused_where_ranks_share_experts(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 5.23 it has no such implementations; before 5.22 not even the module."""
    name = "transformers.distributed.expert_parallel"
    with pytest.raises(Unsupported, match=r"transformers 5\.23 or later, got"):
        without(monkeypatch, "moe_torch.transformers.parallel", {name: types.ModuleType(name) if there else None})


@pytest.mark.parametrize(
    "kind", ["concatenated", "transposed_interleaved_bias", "ungated", "clamped_silu", "softcapped_silu", "norm"]
)
def test_gradients_are_those_of_eager_experts(kind: str) -> None:
    """Into hidden states, the model's own router weights and every parameter."""
    experts = build_experts(kind).requires_grad_(True)
    hidden, ids, weights = routed("cpu")
    leaves = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    with running_on("reference"):
        found = torch.autograd.grad(experts(hidden, ids, weights).square().sum(), leaves)
    experts.config._experts_implementation = "eager"
    wanted = torch.autograd.grad(experts(hidden, ids, weights).square().sum(), leaves)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=f"leaf {number} of {kind}")


def test_a_compiled_function_follows_what_the_experts_are() -> None:
    """One compiled function over modules of one class that compute differently."""
    with running_on("reference") as device:
        silu, gelu = build_experts("function", device), build_experts("concatenated", device)
        clamped, wider = (build_experts("transposed_interleaved_bias", device) for _ in range(2))
        wider.limit = 3.0
        compiled = torch.compile(lambda experts, *inputs: experts(*inputs), backend="aot_eager", fullgraph=True)
        inputs = routed(device)
        for experts in (silu, gelu, clamped, wider, clamped):
            require_equal(compiled(experts, *inputs), experts(*inputs), type(experts).__name__)
        gelu.act_fn = torch.nn.SiLU()
        require_equal(compiled(gelu, *inputs), gelu(*inputs), "another activation")
        assert not torch.equal(clamped(*inputs), wider(*inputs))


def test_experts_of_other_processes_are_left_out() -> None:
    """Under expert parallelism transformers gives such slots the id E and the weight 0."""
    with running_on("reference"):
        experts, (x, ids, weights) = build_experts("concatenated"), routed("cpu")
        elsewhere = ids >= E // 2
        marked = experts(x, ids.masked_fill(elsewhere, E), weights.masked_fill(elsewhere, 0))
        torch.testing.assert_close(marked, experts(x, ids, weights.masked_fill(elsewhere, 0)), rtol=1e-5, atol=1e-5)


def test_a_slot_without_an_expert_counts_in_no_gradient_of_a_norm() -> None:
    with running_on("reference"):
        experts, (x, ids, weights) = build_experts("norm").requires_grad_(), routed("cpu")
        ids[0], weights[0] = E, torch.nan
        experts(x, ids, weights).sum().backward()
        (found,) = [one.grad for name, one in experts.named_parameters() if "norm" in name]
    assert found.any() and found.isfinite().all()


def test_strided_arguments() -> None:
    with running_on("reference"):
        experts, inputs = build_experts("concatenated"), routed("cpu")
        strided = [tensor.t().contiguous().t() for tensor in inputs]
        assert not any(tensor.is_contiguous() for tensor in strided)
        require_equal(experts(*strided), experts(*inputs), "strided")


class _LargestResult(TorchDispatchMode):
    """Remembers the largest tensor that any operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        own = [one for one in torch.utils._pytree.tree_leaves(results) if isinstance(one, torch.Tensor)]
        given = {
            tensor.data_ptr() for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)
        }
        self.elements = max([self.elements, *[one.numel() for one in own if one.data_ptr() not in given]])
        return results


@pytest.mark.parametrize("kind", ["concatenated", "transposed_interleaved_bias"])
def test_weights_are_not_copied(kind: str) -> None:
    with running_on("reference"):
        experts, inputs = build_experts(kind), routed("cpu")
        with _LargestResult() as largest:
            experts(*inputs)
    assert 0 < largest.elements <= T * D < experts.down_proj.numel()


def test_weights_in_a_mapped_file(tmp_path: pathlib.Path) -> None:
    """transformers maps stacked weights on a CPU, where files align them to 8 bytes only."""
    with running_on("reference"):
        model = build("gpt_oss")
        wanted = model(tokens("cpu")).logits
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moebius").eval()
        experts = loaded.model.layers[0].mlp.experts
        experts.gate_up_proj.data = mapped(tmp_path / "weights", experts.gate_up_proj)
        with torch.no_grad():
            parameter = experts.gate_up_proj
            assert parameter.data_ptr() % 16
            require_close(loaded(tokens("cpu")).logits, wanted)
        assert experts.gate_up_proj is parameter
        assert parameter.data_ptr() % 16 == 0
        assert moe_torch.transformers.align_weights(loaded) == 0


def test_parameters_of_other_modules_in_experts_stay_where_they_are() -> None:
    experts, part = build_experts("concatenated"), torch.nn.Module()
    part.weight = torch.nn.Parameter(torch.zeros(9)[1:])
    experts.part = part
    assert moe_torch.transformers.align_weights(experts) == 0 and part.weight.data_ptr() % 16
