"""The Flax layers are optional: everything else of moe_jax, the functional layer included, works without flax."""

from __future__ import annotations

import pytest

from tests.support.runtime.isolation import run_blocked

NO_ATTEMPT = "assert not [name for name in blocker.attempts if name.startswith('flax')], blocker.attempts\n"


def test_moe_jax_imports_no_flax() -> None:
    run_blocked(("flax",), f"import moe_jax\n{NO_ATTEMPT}")


def test_the_functional_layer_runs_without_flax() -> None:
    run_blocked(
        ("flax", "torch", "moe_torch", "triton"),
        "import jax\nfrom moe_jax import layers\n"
        "spec = layers.MoELayerSpec(16, 8, 4, 2)\n"
        "parameters = layers.initialize(spec, jax.random.key(0))\n"
        "forward = jax.jit(lambda parameters, x: layers.forward(parameters, x, spec))\n"
        "y = forward(parameters, jax.numpy.ones((2, 3, 16)))\n"
        f"assert y.shape == (2, 3, 16) and y.any()\n{NO_ATTEMPT}",
    )


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_a_missing_flax_is_named_with_its_fix(flavour: str) -> None:
    run_blocked(
        ("flax",),
        f"try:\n    import moe_jax.{flavour}\nexcept NotImplementedError as error:\n"
        f"    assert 'moe_jax.{flavour} needs flax' in str(error), error\n"
        "    assert \"pip install 'moebius[flax]'\" in str(error), error\n"
        "else:\n    raise SystemExit('imported without flax')\n",
    )
