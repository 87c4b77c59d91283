"""The Flax layers are optional: everything else of moe_jax, the functional layer included, works without flax."""

from __future__ import annotations

from tests.support.runtime.isolation import run_blocked

RUN = """
import jax
from moe_jax import layers
spec = layers.MoELayerSpec(16, 8, 4, 2)
parameters = layers.initialize(spec, jax.random.key(0))
y = jax.jit(lambda parameters, x: layers.forward(parameters, x, spec))(parameters, jax.numpy.ones((2, 3, 16)))
assert y.shape == (2, 3, 16) and y.any()
assert not [name for name in blocker.attempts if name.startswith("flax")], blocker.attempts
for flavour in ("nnx", "linen"):
    try:
        __import__(f"moe_jax.{flavour}")
    except NotImplementedError as error:
        assert f"moe_jax.{flavour} needs flax" in str(error), error
        assert "pip install 'moebius[flax]'" in str(error), error
    else:
        raise SystemExit("imported without flax")
"""


def test_the_functional_layer_runs_without_flax_and_the_others_name_the_fix() -> None:
    run_blocked(("flax", "torch", "moe_torch", "triton"), RUN)
