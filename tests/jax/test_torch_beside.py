"""torch installed beside JAX: `import moe_jax` leaves it alone, and either may be imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch", reason="needs torch beside jax")

ALONE = """
import sys
import jax.numpy as jnp
import moe_jax
assert moe_jax.scale_rows(jnp.ones((4, 4)), jnp.ones((4, 1))).sum() == 16
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
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


def run(program: str) -> None:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("more", ["", "import moe_jax.parity, moe_jax.modular\n"], ids=["moe_jax", "everything"])
def test_torch_is_not_imported(more: str) -> None:
    run(ALONE.replace("import moe_jax\n", f"import moe_jax\n{more}"))


def test_flax_layers_do_not_import_torch() -> None:
    pytest.importorskip("flax", reason="needs flax")
    run(ALONE.replace("import moe_jax\n", "import moe_jax.linen, moe_jax.nnx\n"))


@pytest.mark.parametrize(
    "imports",
    ["import torch\nimport moe_jax", "import moe_jax\nassert importlib.util.find_spec('torch')\nimport torch",
        "import moe_jax\nimport torch.nn\nimport torch", "import tvm_ffi\nimport moe_jax, torch"],
    ids=["torch first", "torch later", "a part of torch later", "tvm_ffi first"],
)  # fmt: skip
def test_tvm_ffi_takes_torch_in_any_order(imports: str) -> None:
    run(BESIDE.format(imports=imports))
