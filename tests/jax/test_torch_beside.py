"""torch installed beside JAX: `import moe_jax` leaves it alone, and either may be imported first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch", reason="needs torch beside jax")

ALONE = """
import sys
import jax.numpy as jnp
import moe_jax, moe_jax.parity, moe_jax.modular{flax}
assert moe_jax.scale_rows(jnp.ones((4, 4)), jnp.ones((4, 1))).sum() == 16
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
assert importlib.util.find_spec("torch")
import torch.nn, torch
"""

#: What tvm_ffi's own users pass to its functions.
BESIDE = """
import importlib.util, sys
{imports}
import jax.numpy as jnp, tvm_ffi
assert moe_jax.scale_rows(jnp.ones((4, 4)), jnp.ones((4, 1))).sum() == 16
echo = tvm_ffi.get_global_func("testing.echo")
for name in ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn"):
    assert echo(getattr(torch, name)) == tvm_ffi.convert(getattr(torch, name)) == name
tensor = torch.arange(4.0)
same = echo(tensor)
assert type(same) is torch.Tensor and same.data_ptr() == tensor.data_ptr(), type(same)
assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
assert tvm_ffi.stream.torch is tvm_ffi.core.torch is torch and "TorchStreamContext" in vars(tvm_ffi.stream)
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("moe_jax")]
array = moe_jax.from_dlpack(torch.arange(32.0))
assert torch.from_dlpack(array).data_ptr() == array.unsafe_buffer_pointer()
"""


@pytest.mark.parametrize("imports", [ALONE, "import torch\nimport moe_jax", "import tvm_ffi\nimport moe_jax, torch"],
    ids=["torch later", "torch first", "tvm_ffi first"])  # fmt: skip
def test_tvm_ffi_takes_torch_in_any_order(imports: str) -> None:
    """Whatever of moe_jax is imported before torch leaves it alone."""
    flax = ", moe_jax.linen, moe_jax.nnx" if importlib.util.find_spec("flax") else ""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", BESIDE.format(imports=imports.format(flax=flax))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
