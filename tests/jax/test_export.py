"""Programs that leave their process: jax.export, with the plans beside it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import moe_jax
from moe_core.base.arrays import ArraySpec
from moe_core.base.recent import Recent
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.plan import registry as plans
from moe_core.runtime import prepare
from moe_jax.bridge import ffi
from tests.support.jax import running_on, small_layer, to_jax
from tests.support.paths import ROOT

H200 = moe_jax.Target("cuda", 90, 132)
ALLOWED = [export.DisabledSafetyCheck.custom_call(ffi.TARGET_NAME)]

RUN_EXPORTED = """
import pathlib, sys
import numpy as np, jax
from jax import export
import moe_jax
folder = pathlib.Path(sys.argv[4])
program = export.deserialize((folder / "program").read_bytes())
x = np.load(folder / "x.npy")
try:
    jax.block_until_ready(program.call(x))
except jax.errors.JaxRuntimeError as error:
    text = str(error)
    assert "plan key must be known in this process" in text and "moe_jax.load_plans(path)" in text, text
else:
    raise SystemExit("ran without its plans")
assert moe_jax.load_plans(folder / "plans.json")
np.save(folder / "result.npy", np.asarray(program.call(x)))
"""


def names_key(text: str, key: str) -> bool:
    """Whether a program calls the plan of this key."""
    return all(f'{name} = "{part}"' in text for name, part in ffi.attributes_of(key).items())


def run_program(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the source of a program in a fresh process on the CPU."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def exported_program(folder: pathlib.Path) -> np.ndarray:
    """What RUN_EXPORTED needs in the folder, and what it shall find."""
    layer = small_layer()
    with running_on("reference"):
        x, experts, routing = to_jax(layer[:3])

        def forward(x: jax.Array) -> jax.Array:
            return moe_jax.moe(x, experts, routing, layer.spec).output

        exported = export.export(jax.jit(forward), platforms=["cpu"], disabled_checks=ALLOWED)(x)
        expected = np.asarray(forward(x))
    (folder / "program").write_bytes(exported.serialize())
    np.save(folder / "x.npy", layer.x)
    keys = moe_jax.export_plans(folder / "plans.json")
    assert any(names_key(exported.mlir_module(), key) for key in keys)
    return expected


@pytest.mark.parametrize("names", [["cuda"], ["cpu", "cuda"]])
def test_export_for_a_gpu_without_one(names: list[str]) -> None:
    layer = small_layer()
    with running_on("reference"), moe_jax.export_target(H200):
        x, experts, routing = to_jax(layer[:3])
        forward = jax.jit(lambda x: moe_jax.moe(x, experts, routing, layer.spec).output)
        exported = export.export(forward, platforms=names, disabled_checks=ALLOWED)(x)
    assert exported.platforms == tuple(names)
    text = exported.mlir_module()
    found = {plans.lookup(key).target.kind for key in plans.registered_keys() if names_key(text, key)}
    assert found == {"cuda", "reference"} if "cpu" in names else found == {"cuda"}


def test_a_function_traced_before_the_target_was_named_is_traced_again() -> None:
    forward = jax.jit(moe_jax.scale_rows)
    x, weights = jnp.ones((4, 4)), jnp.ones((4, 1))
    with running_on("reference"):
        forward(x, weights)
        with moe_jax.export_target(H200):
            exported = export.export(forward, platforms=["cuda"], disabled_checks=ALLOWED)(x, weights)
    assert exported.platforms == ("cuda",)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_export_for_an_unplanned_platform_is_refused(platform: str) -> None:
    forward = jax.jit(lambda x, weights: jax.vmap(moe_jax.scale_rows)(x, weights))
    with (
        running_on("reference"),
        pytest.raises(moe_jax.Unsupported, match=rf"for platform {platform}: .*export_target"),
    ):
        export.export(forward, platforms=[platform], disabled_checks=ALLOWED)(jnp.ones((2, 4, 4)), jnp.ones((2, 4, 1)))


def test_symbolic_shapes_are_refused() -> None:
    (tokens,) = export.symbolic_shape("tokens")
    shapes = jax.ShapeDtypeStruct((tokens, 4), jnp.float32), jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    message = r"x has the symbolic shape \(tokens, 4\), .*with moe_jax.export_buckets, which pads"
    with running_on("reference"), pytest.raises(moe_jax.Unsupported, match=message):
        export.export(jax.jit(moe_jax.scale_rows), disabled_checks=ALLOWED)(*shapes)


def test_padded_tokens_run_a_program_of_another_size() -> None:
    """What the refusal of symbolic shapes advises."""
    layer = small_layer(num_tokens=9)
    with running_on("reference"):
        x, experts, routing = to_jax(layer[:3])

        def forward(x: jax.Array, mask: jax.Array) -> jax.Array:
            return moe_jax.moe(x, experts, routing, layer.spec, token_mask=mask).output

        shapes = jax.ShapeDtypeStruct((16, 48), jnp.float32), jax.ShapeDtypeStruct((16,), bool)
        program = export.export(jax.jit(forward), platforms=["cpu"], disabled_checks=ALLOWED)(*shapes)
        padded, mask = jnp.pad(x, ((0, 7), (0, 0)), constant_values=jnp.nan), jnp.arange(16) < 9
        y = program.call(padded, mask)
        np.testing.assert_allclose(y[:9], moe_jax.moe(x, experts, routing, layer.spec).output, rtol=1e-4, atol=1e-5)
        assert not np.asarray(y[9:]).any()


@pytest.mark.parametrize("wrong", [None, "cuda", moe_jax.Target("reference")])
def test_export_target_takes_a_cuda_target(wrong: object) -> None:
    with (
        pytest.raises(moe_jax.InvalidInput, match=r"export_target must be a Target of kind cuda, got .*132"),
        moe_jax.export_target(wrong),  # type: ignore[arg-type]
    ):
        raise AssertionError("not reached")


def test_a_plan_for_a_gpu_is_refused_on_the_cpu() -> None:
    """What would happen if a program were lowered for one platform and run on another."""
    with running_on("reference"):
        x, weights = jnp.ones((4, 4)), jnp.ones((4, 1))
        plan = plan_scale_rows(ArraySpec(x.shape, "float32"), ArraySpec(weights.shape, "float32"), H200)
        plans.register(plan)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"was made for cuda sm_90.*export the program for this"):
            jax.block_until_ready(jax.jit(lambda **arrays: ffi.call(plan, arrays))(x=x, weights=weights))


def test_an_unknown_key_names_the_fix() -> None:
    with running_on("reference"), pytest.raises(jax.errors.JaxRuntimeError, match=r"got 'nowhere'.*moe_jax.load_plans"):
        key = ffi.attributes_of("nowhere")
        result = jax.ffi.ffi_call(ffi.TARGET_NAME, (jax.ShapeDtypeStruct((4,), jnp.float32),))(jnp.ones(4), **key)
        jax.block_until_ready(result)


def test_arrays_of_another_size_or_dtype_are_refused() -> None:
    """A program whose custom call was given the key of another plan."""
    with running_on("reference"):
        spec = ArraySpec((4, 4), "float32")
        plan = plan_scale_rows(spec, ArraySpec((4, 1), "float32"), moe_jax.Target("reference"))
        plans.register(plan)
        attributes = ffi.attributes_of(plan.key)
        for rows, dtype in ((4, jnp.int32), (4, jnp.float32), (3, jnp.float32), (5, jnp.float32), (4, jnp.float32)):
            result = jax.ShapeDtypeStruct((rows, 4), dtype)
            call = jax.ffi.ffi_call(ffi.TARGET_NAME, result)
            arrays = jnp.ones((rows, 4)), jnp.full((rows, 1), 2.0)
            if (rows, dtype) == (4, jnp.float32):
                np.testing.assert_array_equal(call(*arrays, **attributes), np.full((4, 4), 2.0))
                continue
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"must have the elements 16 of float32, .*, got "):
                jax.block_until_ready(call(*arrays, **attributes))


def test_a_plan_of_strided_arrays_is_refused() -> None:
    x = ArraySpec((4, 4), "float32", (8, 1))
    plan = plan_scale_rows(x, ArraySpec((4, 1), "float32"), moe_jax.Target("reference"))
    with pytest.raises(moe_jax.InvalidInput, match=r"must read row-major arrays in JAX, got strides of x; make the"):
        ffi.publish(plan, "cpu", (0,))


def test_a_program_of_an_earlier_version_is_refused() -> None:
    call = jax.ffi.ffi_call("moebius", jax.ShapeDtypeStruct((4,), jnp.float32))
    with running_on("reference"), pytest.raises(jax.errors.JaxRuntimeError, match=r"'1234567'; export the program and"):
        jax.block_until_ready(call(jnp.ones(4), plan="1234567"))


def test_a_program_runs_whose_plan_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = jax.jit(moe_jax.scale_rows)
    x, weights = jnp.ones((6, 4)), jnp.full((6, 1), 2.0)
    with running_on("reference"):
        expected = np.asarray(forward(x, weights))
        for module, name in ((ffi, "_runnable"), (plans, "_plans"), (prepare, "_prepared")):
            monkeypatch.setattr(module, name, Recent())
        np.testing.assert_array_equal(forward(x, weights), expected)


RUN_BUCKETS = """
import sys
import numpy as np, jax, jax.numpy as jnp
import moe_jax
program = moe_jax.load_buckets(sys.argv[1])
given = dict(np.load(sys.argv[2]))
parameters = {name: jnp.asarray(given[name]) for name in ("wi_0", "wi_1", "wo")} | {"gate": {"kernel": given["gate"]}}
y, aux = program(parameters, given["x"])
slope = jax.grad(lambda parameters: program(parameters, given["x"])[0].sum())(parameters)["wo"]
np.savez(sys.argv[3], y=y, counts=aux.tokens_per_expert, loss=aux.load_balance_loss, slope=slope)
"""


def test_programs_and_buckets_run_in_another_process(tmp_path: pathlib.Path) -> None:
    """A program beside its plans, and buckets with theirs in one file, which pad."""
    from moe_jax import layers

    spec = layers.MoELayerSpec(8, 12, 4, 2)
    parameters = layers.initialize(spec, jax.random.key(0))

    def function(parameters: Any, x: jax.Array, token_mask: jax.Array) -> Any:
        return layers.forward(parameters, x, spec, token_mask=token_mask, return_aux=True)

    @jax.jit
    def plain(parameters: Any, x: jax.Array) -> Any:
        return layers.forward(parameters, x, spec, return_aux=True)

    rows = jax.ShapeDtypeStruct(export.symbolic_shape("tokens, 8"), jnp.float32)
    with running_on("reference"):
        path = tmp_path / "program.zip"
        options: Any = {"tokens": (16, 4), "path": path, "platforms": ["cpu"], "vjp_order": 1}
        assert moe_jax.export_buckets(function, parameters, rows, **options) == (4, 16)
        program = moe_jax.load_buckets(path)
        for count in (0, 4, 16):
            x = np.random.default_rng(count).standard_normal((count, 8), np.float32)
            y, aux = program(parameters, x)
            wanted, other = plain(parameters, x)
            np.testing.assert_allclose(y, wanted, atol=1e-5)
            np.testing.assert_array_equal(aux.ids, other.ids)
            np.testing.assert_allclose(aux.load_balance_loss, other.load_balance_loss, rtol=1e-5)
        jitted = jax.jit(program)(parameters, x)
        np.testing.assert_array_equal(jitted[0], y)
        x = x[:7]
        named = {name: parameters[name] for name in ("wi_0", "wi_1", "wo")} | {"gate": parameters["gate"]["kernel"]}
        np.savez(tmp_path / "in.npz", x=x, **named)
        wanted, aux = plain(parameters, x)
        slope = jax.grad(lambda parameters: plain(parameters, x)[0].sum())(parameters)["wo"]
    expected, names = exported_program(tmp_path), ("program.zip", "in.npz", "out.npz", "")
    done = run_program(RUN_BUCKETS + RUN_EXPORTED, *(tmp_path / name for name in names))
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "result.npy"), expected)
    found = np.load(tmp_path / "out.npz")
    for name, value in {"y": wanted, "slope": slope, "counts": aux.tokens_per_expert}.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    with pytest.raises(moe_jax.InvalidInput, match=r"one number of tokens, at most 16, got \[17\]; split"):
        program(parameters, jnp.ones((17, 8)))
    with pytest.raises(moe_jax.InvalidInput, match="must hold 5 arrays, as when exported, got 4"):
        program(parameters)
    (tmp_path / "other").write_bytes(b"PK")
    with pytest.raises(moe_jax.InvalidInput, match="path must be a file of export_buckets"):
        moe_jax.load_buckets(tmp_path / "other")


def test_wrong_buckets_are_refused(tmp_path: pathlib.Path) -> None:
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("tokens, 8"), jnp.float32)
    options: dict[str, Any] = {"tokens": (4,), "path": tmp_path / "program"}
    with pytest.raises(moe_jax.InvalidInput, match=r"arguments must have one symbolic size.* got none"):
        moe_jax.export_buckets(lambda x, mask: x, jnp.ones((4, 8)), **options)
    with pytest.raises(moe_jax.InvalidInput, match="tokens must name at least one bucket"):
        moe_jax.export_buckets(lambda x, mask: x, rows, **{**options, "tokens": ()})
    with pytest.raises(moe_jax.Unsupported, match=r"results must have k \* tokens rows, got \(5, 8\) for 4 tokens"):
        moe_jax.export_buckets(lambda x, mask: jnp.pad(x, ((0, 1), (0, 0))), rows, **options)
    assert not (tmp_path / "program").exists()


def test_buckets_for_a_gpu_hold_its_plans(tmp_path: pathlib.Path) -> None:
    import zipfile

    rows = jax.ShapeDtypeStruct(export.symbolic_shape("tokens, 8"), jnp.float32)
    with running_on("reference"), moe_jax.export_target(H200):
        moe_jax.export_buckets(
            lambda x, mask: moe_jax.scale_rows(x, jnp.ones((len(x), 1))),
            rows, tokens=(4, 8), path=tmp_path / "program", platforms=["cuda"],
        )  # fmt: skip
    with zipfile.ZipFile(tmp_path / "program") as file:
        (tmp_path / "plans.json").write_bytes(file.read("plans.json"))
    assert [plan.target.kind for plan in plans.read_plans(tmp_path / "plans.json")] == ["cuda"] * 2
