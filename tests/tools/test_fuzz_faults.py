"""Planted faults, which the fuzzer must find: drawn, made small and repeated by their line, or in a stated case."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
import moe_torch.layers.around as around
import moe_torch.layers.moe as torch_layer
from moe_core.ops.lora import beyond
from moe_core.ops.routing import reference, reference_rounding
from moe_jax.layers import functional
from moe_torch.autograd import moe as autograd_moe
from moe_torch.operators import routes as operators
from moe_torch.parallel import peer_ops
from tools.fuzz import __main__ as command
from tools.fuzz import engines, run, run_jax, run_torch
from tools.fuzz.case import Case
from tools.fuzz.draw import sets_of
from tools.fuzz.legal import parse
from tools.fuzz.oracle.real import Real, rounded


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    run_jax.program.cache_clear()


def _without(spec: Callable[[Case], Any], **changes: Any) -> Callable[[Case], Any]:
    return lambda case: dataclasses.replace(spec(case), **changes)


def _missing_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engines, "router_spec", _without(engines.router_spec, scale=1.0))


def _dropped(field: str) -> Callable[[pytest.MonkeyPatch], None]:
    experts = engines.Bundles.experts

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engines.Bundles, "experts", lambda self: dataclasses.replace(experts(self), **{field: None}))

    return plant


def _one_group_less(patch: pytest.MonkeyPatch) -> None:
    plain = reference._mask_groups

    def off_by_one(scores: Any, keys: Any, spec: Any, pairs: bool) -> Any:
        return plain(scores, keys, dataclasses.replace(spec, topk_group=max(1, spec.topk_group - 1)), pairs)

    patch.setattr(reference, "_mask_groups", off_by_one)


def _ties_to_the_higher_id(patch: pytest.MonkeyPatch) -> None:
    plain = reference._best
    patch.setattr(reference, "_FEW_EXPERTS", 0)
    patch.setattr(reference, "_best", lambda keys, count: keys.shape[-1] - 1 - plain(keys[..., ::-1], count))


def _weight_after_the_cast(patch: pytest.MonkeyPatch) -> None:
    plain = moe_torch.ops.moe

    def rounds_twice(x: Any, experts: Any, routing: Any, spec: Any, **options: Any) -> Any:
        if not isinstance(routing, moe_torch.TopK) or routing.ids.shape[1] != 1:
            return plain(x, experts, routing, spec, **options)
        ones = torch.ones_like(routing.weights)
        found = plain(x, experts, moe_torch.TopK(routing.ids, ones), spec, **options)
        return found._replace(output=(found.output.float() * routing.weights).to(found.output.dtype))

    patch.setattr(moe_torch.ops, "moe", rounds_twice)


def _lost_gradient_of_a_loss(patch: pytest.MonkeyPatch) -> None:
    plain = torch_layer.router_losses
    patch.setattr(torch_layer, "router_losses", lambda *given: (plain(*given)[0].detach(), plain(*given)[1]))


def _one_row_beyond_the_bound(patch: pytest.MonkeyPatch) -> None:
    plain = peer_ops.peer_places
    patch.setattr(peer_ops, "peer_places", lambda *given, rank, receive: plain(*given, rank=rank, receive=receive + 1))


def _wrapped_ids(patch: pytest.MonkeyPatch) -> None:
    plain = reference._local_ids
    patch.setattr(reference, "_local_ids", lambda ids, *given: plain(ids.astype("int32"), *given))


def _is_plain_with_bias(case: Case) -> bool:
    return case.kind == "moe" and case.bias and not (case.weights or case.gradient or case.shared)


#: fault -> (what plants it, cases among which it must be found, an option that the smallest case must keep)
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Case], bool], str]] = {
    "missing scale": (_missing_scale, lambda case: case.kind == "route", "scale"),
    "dropped bias": (_dropped("down_bias"), _is_plain_with_bias, "bias"),
    "off by one group": (_one_group_less, lambda case: case.kind == "route", "num_groups"),
    "wrong tie order": (_ties_to_the_higher_id, lambda case: case.kind == "route", ""),
    "rounded before the weight": (_weight_after_the_cast,
        lambda case: (case.kind, case.K, case.on_input, case.weights, case.shared) == ("moe", 1, False, "", 0)
        and "16" in case.dtype,
        "dtype"),
    "lost gradient of a loss": (_lost_gradient_of_a_loss,
        lambda case: case.kind == "layer" and case.balance > 0 and not (case.between or case.weights), "balance"),
    "ids wrapped to int32": (_wrapped_ids, lambda case: case.kind in ("moe", "layout"), "ids_dtype"),
    "one row beyond the bound": (_one_row_beyond_the_bound, lambda case: case.mode == "peer" and case.bound != "",
        "bound"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_and_made_small(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, among, kept = FAULTS[name]
    # torch alone: programs of JAX take longer to compile than all the rest.
    monkeypatch.setattr(run, "FRONT_ENDS", {"torch": run_torch.run})
    sets = (drawn for drawn in sets_of(1, "reference") if among(drawn.static))
    with monkeypatch.context() as patch:
        plant(patch)
        report = run.fuzz(itertools.islice(sets, 40), "reference", most_failures=1)
        assert report.failures, "not found"
        smallest = report.failures[0].smallest
        line = str(report.failures[0]).splitlines()[-1]
        text = line.split('--case "')[1].rstrip('"')
        assert parse(text) == smallest
        assert command.main(["--engines", "reference", "--case", text]) == 1
    assert command.main(["--engines", "reference", "--case", text]) == 0
    assert "FAILED on reference" in capsys.readouterr().out
    sizes = smallest.T, smallest.K, smallest.E, smallest.D, smallest.F
    assert max(sizes) <= 8 and (not kept or getattr(smallest, kept) != getattr(Case, kept)), str(smallest)


def _uncentred(patch: pytest.MonkeyPatch) -> None:
    plain = engines.norm_spec
    patch.setattr(engines, "norm_spec", lambda *given: dataclasses.replace(plain(*given), centred=False))


def _no_latent_norm(patch: pytest.MonkeyPatch) -> None:
    forward = around.ProjectionParameters.forward

    def without(self: Any, x: Any) -> Any:
        norm, self.norm = self.norm, None
        try:
            return forward(self, x)
        finally:
            self.norm = norm

    patch.setattr(around.ProjectionParameters, "forward", without)


def _overwritten_main_grad(patch: pytest.MonkeyPatch) -> None:
    plain = autograd_moe.main_grads
    patch.setattr(autograd_moe, "main_grads", lambda given: {name: own.zero_() for name, own in plain(given).items()})


def _rows_swapped_by_prepacking(patch: pytest.MonkeyPatch) -> None:
    plain = moe_torch.ops.prepack_weights

    def swapped(experts: Any, spec: Any) -> Any:
        down = dataclasses.replace(experts.down, values=experts.down.values.roll(1, 1))
        return plain(dataclasses.replace(experts, down=down), spec)

    patch.setattr(moe_torch.ops, "prepack_weights", swapped)


def _another_layer_of_the_stack(patch: pytest.MonkeyPatch) -> None:
    plain = functional._one_layer
    patch.setattr(functional, "_one_layer", lambda arrays, dtype, index, axes: plain(arrays, dtype, 1 - index, axes))


def _numbers_of_other_slots(patch: pytest.MonkeyPatch) -> None:
    plain = peer_ops.combine_pull_weights
    patch.setattr(peer_ops, "combine_pull_weights", lambda *given, **options: plain(*given, **options).flip(1))


def _unmasked_tokens(patch: pytest.MonkeyPatch) -> None:
    plain = operators.SEND_TABLES.call
    patch.setattr(operators.SEND_TABLES, "call", lambda **given: plain(**given | {"token_mask": None}))


def _headers_left_out(patch: pytest.MonkeyPatch) -> None:
    plain = peer_ops.sum_results
    patch.setattr(peer_ops, "sum_results", lambda *given, **options: plain(*given, **options | {"headers": None}))


def _lightest_tokens(patch: pytest.MonkeyPatch) -> None:
    plain = reference_rounding.topk_keys
    patch.setattr(reference_rounding, "topk_keys", lambda *given: ~plain(*given))


def _adapters(name: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = engines.LoRAFactors
    return lambda patch: patch.setattr(
        engines, "LoRAFactors", lambda **given: plain(**given | {name: change(given[name])})
    )


def _first_adapter(patch: pytest.MonkeyPatch) -> None:
    plain = engines.OPS["moe"]

    def fault(case: Case, ops: Any, arrays: Any) -> Any:
        return plain(case, ops, {**arrays, "adapter_ids": arrays["adapter_ids"].clip(0)})

    patch.setitem(engines.OPS, "moe", fault)


def _neighbours_gradient(patch: pytest.MonkeyPatch) -> None:
    plain = run_torch._gradients

    def fault(*given: Any) -> Any:
        found = plain(*given)
        return found | {"d lora.b2": found["d lora.b2"].roll(1, 0)}

    patch.setattr(run_torch, "_gradients", fault)


def _unscaled_logits(patch: pytest.MonkeyPatch) -> None:
    plain = beyond.adapted_logits

    def fault(of: Any, rows: Any, router: Any, spec: Any, lora: Any) -> Any:
        factors = dataclasses.replace(lora.factors, scale=lora.factors.scale * 0 + 1)
        return plain(of, rows, router, spec, lora._replace(factors=factors))

    patch.setattr(beyond, "adapted_logits", fault)


def _first_adapter_of_the_shared_expert(patch: pytest.MonkeyPatch) -> None:
    plain = beyond.adapted_tokens
    patch.setattr(beyond, "adapted_tokens", lambda of, lora, ids, *rest: plain(of, lora, ids + (ids == -1), *rest))


MOE = "T=3 E=2 D=4 F=4"
ADAPTED = "T=9 E=2 K=2 D=4 F=4 adapters=2"
ROUNDED = "kind=route T=70 K=2 E=6 source=logits tile=16 seed=5"
LAYER = "kind=layer T=5 K=2 E=4 D=8 F=8 source=x"
#: fault -> (what plants it, the front-end that has it, a case in which it must be found).
STATED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "norm not centred": (_uncentred, "torch", f"{LAYER} out_norm=sum centred=True"),
    "no norm of latent rows": (_no_latent_norm, "torch", f"{LAYER} latent=4 latent_norm=True"),
    "adapters without scale": (_adapters("scale", torch.ones_like), "torch", ADAPTED),
    "numbers behind a rank": (_adapters("ranks", lambda ranks: 16 * ranks.clamp(max=1)), "torch", ADAPTED),
    "tokens without an adapter take the first": (_first_adapter, "jax", ADAPTED),
    "a router's adapter without scale": (_unscaled_logits, "jax", "T=9 E=4 D=8 source=x adapters=2 targets=router"),
    "a shared expert takes the first adapter": (
        _first_adapter_of_the_shared_expert, "torch", "T=9 D=4 shared=4 adapters=2 targets=shared_gate_up,shared_down"
    ),
    "the gradient of a neighbour's factor": (_neighbours_gradient, "torch", f"{ADAPTED} gradient=True"),
    "overwritten main_grad": (_overwritten_main_grad, "torch", f"{MOE} gradient=True main_grad=True"),
    "forgotten static scale": (
        _dropped("down_input_scale"), "torch", f"{MOE} weights=fp8_tensor activations=fp8_tensor static_scales=True"
    ),
    "rows swapped by prepacking": (
        _rows_swapped_by_prepacking, "torch",
        "T=3 E=2 D=32 F=32 dtype=bfloat16 weights=mxfp4 weight_layout=out_in prepacked=True",
    ),
    "numbers come from other slots": (
        _numbers_of_other_slots, "torch", "kind=exchange mode=peer T=9 K=8 E=8 ranks=3 D=9 seed=1"
    ),
    "masked tokens are sent": (
        _unmasked_tokens, "torch", "kind=exchange mode=all_to_all T=5 E=4 ranks=2 masked=True seed=1"
    ),
    "headers are not compared": (_headers_left_out, "torch", "kind=exchange mode=direct T=3 E=4 ranks=2 seed=10"),
    "lightest tokens are kept": (_lightest_tokens, "torch", f"{ROUNDED} rounding=down"),
    "another layer of the stack": (_another_layer_of_the_stack, "jax", f"{LAYER} stack=2"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_planted_faults_are_found_in_their_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, front_end, text = STATED[name]
    monkeypatch.setattr(run, "FRONT_ENDS", {front_end: {"torch": run_torch.run, "jax": run_jax.run}[front_end]})
    case = parse(text)
    assert not run.examine(case, "reference").complaints
    run_jax.program.cache_clear()
    with monkeypatch.context() as patch:
        plant(patch)
        assert run.examine(case, "reference").complaints, "not found"


def test_one_bit_less_than_tf32_is_found() -> None:
    a, b = (torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    allowed = Real.exact(a).matmul(Real.exact(b), "tf32")

    def cut_off(number: Any, bits: int) -> Any:
        step = torch.exp2(torch.frexp(number)[1] - 1.0 - bits)
        return torch.trunc(number / step) * step

    for bits, fine in ((10, True), (7, False)):
        product = rounded(cut_off(a, bits) @ cut_off(b, bits), "float32")
        assert bool(((product - allowed.value).abs() <= allowed.error).all()) == fine
