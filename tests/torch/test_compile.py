"""Torch operators in compiled and exported programs: symbolic shapes, no recompilation, the bits of eager calls."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_torch
from moe_torch.bridge.operator import Operator
from moe_torch.operators import stages
from moe_torch.operators import table as operators
from tests.support.torch import (
    D_FF,
    D_MODEL,
    NUM_EXPERTS,
    REAL_KERNELS,
    TOKEN_COUNTS,
    full_layer,
    on_engines,
    require_equal,
    running_on,
    to_torch,
    torch_layer,
)

ROUTER = moe_torch.RouterSpec(2, renormalize=True)
SILU = moe_torch.Activation("silu")
SPEC = moe_torch.MoESpec(SILU, ROUTER)
FIRST = moe_torch.MatmulSpec("in_out", "token", "slot", SILU)
SECOND = moe_torch.MatmulSpec("in_out", "slot", "slot")
BY_ROW = moe_torch.MatmulSpec("in_out", "token", "row", SILU)


def whole(x: Any, layer: Any) -> Any:
    """The composed operator, and a use of its output."""
    result = moe_torch.moe(x, layer.experts, layer.routing, SPEC)
    return moe_torch.MoEOutput(result.output + 1, *result[1:])


def staged(x: Any, layer: Any) -> Any:
    """Every other operator, with a layout made and used inside the graph."""
    chosen = moe_torch.route(moe_torch.router(x, layer.routing.weight), ROUTER)
    bitmatrix = moe_torch.pack_bitmatrix(chosen.ids, NUM_EXPERTS)
    layout = moe_torch.make_layout(chosen.ids, NUM_EXPERTS, alignment=4)
    hidden = moe_torch.matmul_ogs(moe_torch.MatmulOperands(x, layer.experts.gate_up), layout, FIRST)
    rows = moe_torch.matmul_ogs(moe_torch.MatmulOperands(x, layer.experts.gate_up), layout, BY_ROW)
    operands = moe_torch.MatmulOperands(hidden, layer.experts.down, row_weight=chosen.weights)
    slots = moe_torch.matmul_ogs(operands, layout, SECOND)
    dense = moe_torch.matmul_ogs(
        moe_torch.MatmulOperands(x, layer.experts.gate_up[0]), None, moe_torch.MatmulSpec("in_out")
    )
    shared = moe_torch.scale_rows(x, chosen.weights[:, :1].contiguous())
    out = moe_torch.reduce(slots, layout, shared=shared, out_dtype=torch.float32)
    by_row = moe_torch.reduce(rows, layout, order="row")
    ids = moe_torch.unpack_bitmatrix(bitmatrix, NUM_EXPERTS, 2)
    return out, by_row, moe_torch.activation(dense, SILU), ids, layout.spec.num_tokens


PROGRAMS = {"whole": whole, "staged": staged}


def tensors_of(result: Any) -> tuple[Any, ...]:
    return tuple(item for item in result if isinstance(item, torch.Tensor))


def draw_x(num_tokens: int, device: Any) -> Any:
    return torch_layer(device, num_tokens=num_tokens, seed=num_tokens).x


def check_program(program: Any, backend: Any, engine: str, counts: tuple[int, ...] = TOKEN_COUNTS) -> None:
    """Compile once, run with every number of tokens, and require the eager bits."""
    torch._dynamo.reset()
    with running_on(engine) as device:
        layer = torch_layer(device)
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        for number, num_tokens in enumerate(counts):
            x = draw_x(num_tokens, device)
            torch._dynamo.mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                result = compiled(x, layer)
            require_equal(tensors_of(result), tensors_of(program(x, layer)), f"{num_tokens} tokens")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_changing_number_of_tokens_recompiles_nothing(program: str) -> None:
    check_program(PROGRAMS[program], "aot_eager", "reference")


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_programs_on_real_kernels(program: str) -> None:
    check_program(PROGRAMS[program], "aot_eager", REAL_KERNELS, counts=(5, 8))


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles for a CPU with c++, and this machine has none"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("program", PROGRAMS)
def test_inductor(program: str) -> None:
    check_program(PROGRAMS[program], "inductor", "reference", counts=(5, 9))


def test_unmarked_tokens_compile_twice_at_most() -> None:
    """Without mark_dynamic the first call is specialised; the second compiles for every number of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    with running_on("reference"):
        layer = torch_layer()
        compiled = torch.compile(whole, fullgraph=True, backend=counter)
        for num_tokens in TOKEN_COUNTS:
            compiled(draw_x(num_tokens, "cpu"), layer)
    assert counter.frame_count == 2


def test_options_are_guarded_by_value() -> None:
    """Equal specs reuse the program, other specs get their own: none runs with another's options."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    names = ("silu", "silu", "gelu", "relu2", "swiglu_oai", "silu")
    specs = [moe_torch.MoESpec(moe_torch.Activation(name), moe_torch.RouterSpec(2)) for name in names]
    specs += [
        moe_torch.MoESpec(SILU, moe_torch.RouterSpec(top_k, scale=scale)) for top_k, scale in ((3, 1.0), (4, 1.5))
    ]
    with running_on("reference"):
        layer = torch_layer()
        compiled = torch.compile(moe_torch.moe, fullgraph=True, backend=counter)
        for spec in specs:
            result = compiled(layer.x, layer.experts, layer.routing, spec)
            require_equal(tuple(result), tuple(moe_torch.moe(*layer[:3], spec)), str(spec))
    assert counter.frame_count == len(set(specs))


def test_specs_made_inside_the_program() -> None:
    def program(x: Any, layer: Any) -> Any:
        spec = moe_torch.MoESpec(moe_torch.Activation("gelu"), moe_torch.RouterSpec(top_k=x.shape[1] - D_MODEL + 2))
        return tuple(moe_torch.moe(x, layer.experts, layer.routing, spec))

    check_program(program, "aot_eager", "reference", counts=(5, 6))


def test_layouts_cross_program_boundaries() -> None:
    """A layout made eagerly is an argument of a compiled program, and a compiled program's layout is used eagerly."""
    torch._dynamo.reset()
    with running_on("reference"):
        layer = torch_layer()
        make = torch.compile(moe_torch.make_layout, fullgraph=True, backend="aot_eager", dynamic=True)
        multiply = torch.compile(moe_torch.matmul_ogs, fullgraph=True, backend="aot_eager", dynamic=True)
        for number, num_tokens in enumerate((5, 9, 12)):
            x = draw_x(num_tokens, "cpu")
            ids = moe_torch.moe(x, *layer[1:]).ids
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                layout = make(ids, NUM_EXPERTS)
                assert layout.spec == moe_torch.LayoutSpec(num_tokens, 2, NUM_EXPERTS)
                operands = moe_torch.MatmulOperands(x, layer.experts.gate_up)
                require_equal(
                    multiply(operands, layout, FIRST), moe_torch.matmul_ogs(operands, layout, FIRST), "product"
                )


class Program(torch.nn.Module):
    """A program over a layer's weights as buffers."""

    def __init__(self, program: Any, layer: Any) -> None:
        super().__init__()
        self.program, self.layer = program, layer
        self.register_buffer("gate_up", layer.experts.gate_up)
        self.register_buffer("down", layer.experts.down)
        self.register_buffer("router", layer.routing.weight)

    def forward(self, x: Any) -> Any:
        experts = moe_torch.ExpertWeights(self.gate_up, self.down)
        layer = self.layer._replace(x=x, experts=experts, routing=moe_torch.RouterWeights(self.router))
        return tensors_of(self.program(x, layer))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_exported_programs_take_any_number_of_tokens(program: str, strict: bool) -> None:
    with running_on("reference"):
        layer = torch_layer()
        module = Program(PROGRAMS[program], layer)
        tokens = torch.export.Dim("tokens")
        exported = torch.export.export(module, (layer.x,), dynamic_shapes=({0: tokens},), strict=strict)
        for num_tokens in TOKEN_COUNTS:
            x = draw_x(num_tokens, "cpu")
            require_equal(exported.module()(x), module(x), f"{num_tokens} tokens")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch's own reading of its file
def test_exported_programs_are_saved_and_loaded(tmp_path: Any) -> None:
    with running_on("reference"):
        layer = torch_layer()
        module = Program(whole, layer)
        shapes = ({0: torch.export.Dim("tokens")},)
        torch.export.save(torch.export.export(module, (layer.x,), dynamic_shapes=shapes), tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        x = draw_x(6, "cpu")
        require_equal(loaded(x), module(x), "loaded")


def test_bundles_are_arguments_of_exported_programs() -> None:
    class Bundled(torch.nn.Module):
        def forward(self, x: Any, experts: Any, routing: Any) -> Any:
            return moe_torch.moe(x, experts, routing, SPEC).output

    with running_on("reference"):
        layer = torch_layer()
        exported = torch.export.export(Bundled(), tuple(layer[:3])).module()
        require_equal(exported(*layer[:3]), moe_torch.moe(*layer[:3], SPEC).output, "bundles")


def operator_samples(device: Any) -> dict[str, tuple[Operator, tuple[Any, ...]]]:
    """Every operator with arguments, every optional tensor given somewhere, as the public functions call them."""
    samples: dict[str, tuple[Operator, tuple[Any, ...]]] = {}
    original = Operator.run

    def record(operator: Operator, arguments: tuple[Any, ...]) -> Any:
        samples[f"{operator.name} {sum(item is not None for item in arguments)} arguments"] = (operator, arguments)
        return original(operator, arguments)

    Operator.run = record
    try:
        layer = torch_layer(device)
        _, _, _, ids, _ = staged(layer.x, layer)
        result = whole(layer.x, layer)
        moe_torch.moe(layer.x, layer.experts, moe_torch.RouterLogits(result.logits), SPEC)
        topk = moe_torch.TopK(ids, result.weights)
        moe_torch.moe(layer.x, layer.experts, topk, moe_torch.MoESpec(SILU))
        full, options = full_layer()
        options = {name: to_torch(value, device) for name, value in options.items()}
        full_tensors = to_torch(tuple(full[:3]), device)
        everything = moe_torch.moe(*full_tensors, full.spec, **options)
        experts, routing = full_tensors[1:]
        moe_torch.router(full_tensors[0], routing.weight, bias=routing.bias, spec=moe_torch.LogitsSpec("out_in"))
        chosen = moe_torch.route(
            everything.logits,
            full.spec.router,
            correction_bias=routing.correction_bias,
            token_mask=options["token_mask"],
        )
        moe_torch.route_rounded(torch.randn(32, 4, device=device), moe_torch.RouterSpec(2), moe_torch.TokenRounding(16))
        layout = moe_torch.make_layout(
            chosen.ids, 3, expert_map=options["expert_map"], token_mask=options["token_mask"], max_rows=4
        )
        moe_torch.make_layout(chosen.ids, 4, rows=5)
        moe_torch.layout_of_runs(torch.ones(2, 3, dtype=torch.int32, device=device), 8)
        moe_torch.gather_rows(full_tensors[0], moe_torch.make_layout(chosen.ids, 4))
        separate = moe_torch.MatmulOperands(
            full_tensors[0],
            torch.stack([experts.gate_up, experts.gate_up]),
            up=torch.stack([experts.up, experts.up]),
            bias=torch.stack([experts.gate_up_bias, experts.gate_up_bias]),
            up_bias=torch.stack([experts.up_bias, experts.up_bias]),
            row_weight=chosen.weights.reshape(-1),
            layer_index=torch.ones(1, dtype=torch.int32, device=device),
        )
        spec = moe_torch.MatmulSpec("out_in", "token", "slot", full.spec.activation, out_dtype="float16")
        moe_torch.matmul_ogs(separate, layout, spec)
        gate, up = torch.randn(6, D_FF, device=device), torch.randn(6, D_FF, device=device)
        moe_torch.activation(gate, full.spec.activation, up=up, out_dtype="bfloat16")
        moe_torch.rms_norm(gate, torch.ones(D_FF, device=device), moe_torch.NormSpec())
        shared, shared_gate = torch.randn(7, 8, device=device), torch.randn(7, 1, device=device)
        moe_torch.reduce(torch.randn(14, 8, device=device), layout, shared=shared, shared_gate=shared_gate)
    finally:
        Operator.run = original
    return samples


@on_engines
def test_opcheck_of_every_operator(engine: str) -> None:
    """Schema (no mutation, no alias), fake shapes, autograd registration and AOT with dynamic shapes."""
    with running_on(engine) as device:
        samples = operator_samples(device)
        every = {operator.name for operator, _ in samples.values()}
        declared = [value for value in vars(stages).values() if type(value) is Operator]
        quantised = {stages.MATMUL_OGS_QUANTIZED.name, stages.QUANTIZE_ROWS.name}
        assert every == {operator.name for operator in (*declared, *operators.MOE.values())} - quantised
        utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        # Fakes and graphs do not depend on the engine: the slow one checks what runs.
        chosen = utilities if engine == "reference" else utilities[:1]
        for label, (operator, arguments) in samples.items():
            results = torch.library.opcheck(operator.overload, arguments, test_utils=chosen)
            assert set(results.values()) == {"SUCCESS"}, f"{label}: {results}"


def test_operators_keep_strides_and_are_known_to_the_compiler() -> None:
    for operator in operators.MOE.values():
        assert torch.Tag.pt2_compliant_tag in operator.overload.tags
        assert torch.Tag.needs_exact_strides in operator.overload.tags


def test_fake_and_meta_tensors_have_the_shapes_of_real_ones() -> None:
    with running_on("reference"):
        for label, (operator, arguments) in operator_samples("cpu").items():
            real = operator.run(arguments)
            meta = operator.run(
                tuple(item.to("meta") if isinstance(item, torch.Tensor) else item for item in arguments)
            )
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in arguments]
                fake = operator.run(tuple(fakes))
            for kind in (meta, fake):
                for one, other in zip(
                    *(item if isinstance(item, tuple) else (item,) for item in (real, kind)), strict=True
                ):
                    assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), label


def test_checked_is_refused_in_programs() -> None:
    torch._dynamo.reset()
    with running_on("reference"):
        layer = torch_layer()
        compiled = torch.compile(
            lambda x: moe_torch.moe(x, *layer[1:], checked=True).output, fullgraph=True, backend="eager"
        )
        with pytest.raises(Exception, match="checked=True reads a counter on the host"):
            compiled(layer.x)


def test_numbers_of_tokens_nobody_knows_yet() -> None:
    """An unbacked size (as from nonzero) exports without a guard, and the program checks it when it runs."""

    class Filtered(torch.nn.Module):
        def forward(self, x: Any, keep: Any) -> Any:
            chosen = x[keep]
            return moe_torch.router(chosen, weight), moe_torch.route(moe_torch.router(chosen, weight), ROUTER).ids

    with running_on("reference"):
        layer = torch_layer()
        weight = layer.routing.weight
        keep = torch.from_numpy(np.arange(9) % 2 == 0)
        exported = torch.export.export(Filtered(), (layer.x, keep)).module()
        for mask in (keep, ~keep, torch.zeros(9, dtype=torch.bool)):
            require_equal(exported(layer.x, mask), Filtered()(layer.x, mask), "unbacked")
