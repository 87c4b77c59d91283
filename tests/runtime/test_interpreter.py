"""The interpreter engine: known faults of Triton's interpreter are corrected, launches are safe and need no torch."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import triton

from moe_core.base.dtypes import numpy_dtype
from moe_core.errors import Unsupported
from moe_core.plan.steps import Scalar
from tests.support.paths import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_a_process_of_its_own")

if INTERPRETED:
    import triton

    from moe_core.runtime import interpreter
    from tests.support.runtime import interpreter_faults, interpreter_kernels
    from tests.support.runtime.interpreter_faults import FAULTS

    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
    NAMES = list(FAULTS)
else:
    NAMES = []


def _python(*arguments: str, **environment: str) -> str:
    """Run Python in a fresh process and return what it printed; its failure fails the test."""
    finished = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "TRITON_INTERPRET": "1", **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.skipif(INTERPRETED, reason="this process interprets already")
def test_in_a_process_of_its_own() -> None:
    """Where kernels are compiled (a GPU is present), this file runs in a process that interprets them."""
    _python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(pathlib.Path(__file__)))


def _pointer(array: np.ndarray) -> object:
    return interpreter.HostPointer(array.ctypes.data, array.dtype.name)


def _argument(value: np.ndarray | int) -> object:
    return _pointer(value) if isinstance(value, np.ndarray) else Scalar(value)


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_fault_is_corrected(name: str) -> None:
    fault = FAULTS[name]
    outputs = fault.fresh_outputs()
    arguments = [(name, _pointer(array)) for name, array in outputs.items()]
    arguments += [(name, _argument(value)) for name, value in fault.inputs.items()]
    interpreter.launch(fault.kernel, (1,), [*arguments, *fault.constants.items()])
    assert fault.is_right(outputs), f"{name}: got {outputs}, expected {fault.outputs}"


@pytest.fixture(scope="module")
def shipped() -> dict[str, bool]:
    """Whether Triton's interpreter as shipped is right, by fault."""
    return json.loads(_python("-m", "tests.support.runtime.interpreter_faults").splitlines()[-1])


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_fault_exists_in_the_shipped_interpreter(name: str, shipped: dict[str, bool]) -> None:
    """So the test above fails when its correction is taken away, and a correction that is no longer needed shows."""
    known_to_be_right = FAULTS[name].right_from <= VERSION
    assert shipped[name] == known_to_be_right


@interpreted
def test_device_functions_are_refused() -> None:
    value = np.zeros(4, np.float32)
    with pytest.raises(Unsupported, match=r"libdevice\.tanh is not interpreted; write it with triton\.language"):
        interpreter.launch(interpreter_kernels.libdevice_kernel, (1,), [("output", _pointer(value))])
    with pytest.raises(Unsupported, match="inline assembly is not interpreted; give the kernel a"):
        interpreter.launch(interpreter_kernels.assembly_kernel, (1,), [("output", _pointer(value))])


@interpreted
def test_launch_writes_in_place_for_every_program() -> None:
    output = np.full((2, 3, 4), -1, np.int64)
    arguments = [("output", _pointer(output)), ("offset", Scalar(2**40, "int64")), ("scale", Scalar(0.5, "float32"))]
    interpreter.launch(interpreter_kernels.grid_kernel, (2, 3, 4), arguments)
    x, y, z = np.meshgrid(range(2), range(3), range(4), indexing="ij")
    assert (output == 2**40 + (x * 100 + y * 10 + z) // 2).all()


@interpreted
def test_absent_pointers_are_none_and_booleans_are_bytes() -> None:
    mask, output = np.array([True, False, True, True]), np.zeros(4, np.int32)
    arguments = [("output", _pointer(output)), ("mask", _pointer(mask)), ("bias", None)]
    interpreter.launch(interpreter_kernels.optional_kernel, (1,), arguments)
    assert output.tolist() == [1, 0, 1, 1]
    bias = np.full(4, 10, np.int32)
    arguments[2] = ("bias", _pointer(bias))
    interpreter.launch(interpreter_kernels.optional_kernel, (1,), arguments)
    assert output.tolist() == [11, 10, 11, 11]


@interpreted
def test_helpers_may_call_helpers() -> None:
    output = np.zeros(8, np.float32)
    interpreter.launch(interpreter_kernels.nested_kernel, (1,), [("output", _pointer(output))])
    assert np.allclose(output, np.arange(8) / (1 + np.exp(-np.arange(8.0))) + 28)


@interpreted
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_with_any_combine_function(axis: int) -> None:
    values = np.random.default_rng(0).integers(-9, 9, (8, 16)).astype(np.float32)
    shape = values.shape[1 - axis]
    best, last, scanned = np.zeros(shape, np.float32), np.zeros(shape, np.int32), np.zeros((8, 16), np.float32)
    arguments = [(name, _pointer(array)) for name, array in zip("vbps", (values, best, last, scanned), strict=True)]
    interpreter.launch(interpreter_kernels.combine_kernel, (1,), [*arguments, ("AXIS", axis)])
    largest = values.max(axis)
    where = values == np.expand_dims(largest, axis)
    positions = np.arange(values.shape[axis]).reshape((-1, 1) if axis == 0 else (1, -1))
    assert (best == largest).all()
    assert (last == np.where(where, positions, -1).max(axis)).all()
    reverse = np.flip(np.maximum.accumulate(np.flip(values, axis), axis), axis)
    assert (scanned == reverse).all()


@interpreted
@pytest.mark.parametrize("flag", [0, 1])
def test_operands_of_any_size_and_type(flag: int) -> None:
    """Bytes beside numbers stay bytes, and zeros keep their signs, whichever was seen first."""
    a, output, zeros = np.arange(200, 208).astype(np.uint8), np.zeros((4, 8), np.int64), np.ones(2, np.float32)
    arrays = {"output": output, "zeros": zeros, "a": a, "flag": np.array([flag], np.int32)}
    arguments = [(name, _pointer(array)) for name, array in arrays.items()]
    interpreter.launch(interpreter_kernels.operands_kernel, (1,), arguments)
    rows, columns = np.arange(4)[:, None], np.arange(8)[None, :]
    assert (output == 300 - (columns - rows) * 2 + a + (a if flag else rows)).all()
    # Triton 3.6 has no -0.0 in its language.
    assert np.signbit(zeros).tolist() == [False, not triton.__version__.startswith("3.6.")]


@interpreted
def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="incompatible dimensions at index 0: 4 and 8"):
        interpreter.launch(interpreter_kernels.misfit_kernel, (1,), [])


@interpreted
def test_tensor_descriptors() -> None:
    source = np.arange(6 * 24, dtype=np.float32).reshape(6, 24)
    output = np.zeros((6, 24), np.float32)
    arguments = [("output", _pointer(output)), ("source", _pointer(source)), ("ROWS", 6), ("COLUMNS", 24)]
    interpreter.launch(interpreter_kernels.descriptor_kernel, (1,), arguments)
    expected = np.zeros((6, 24), np.float32)
    expected[4:, 16:] = 2 * source[:2, 16:]
    assert (output == expected).all()


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_atomics_of_every_float(dtype: str) -> None:
    output = np.arange(9).astype(numpy_dtype(dtype))
    expected, replacement = np.array([0, 9, 2, 9]).astype(output.dtype), np.full(4, 50).astype(output.dtype)
    arrays = {"output": output, "expected": expected, "replacement": replacement}
    arguments = [(name, _pointer(array)) for name, array in arrays.items()]
    # Triton has no exchange of 16-bit floats.
    arguments.append(("EXCHANGE", dtype == "float32"))
    interpreter.launch(interpreter_kernels.exchange_kernel, (1,), arguments)
    assert output.astype(np.float32).tolist() == [50, 1, 50, 3, 0, 1, 2, 3, 11]


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_sort_flip_and_cumulative_sum(dtype: str) -> None:
    source = np.random.default_rng(0).integers(-9, 9, (4, 8)).astype(numpy_dtype(dtype))
    output = np.zeros((2, 4, 8), np.float32)
    arguments = [("output", _pointer(output)), ("source", _pointer(source))]
    interpreter.launch(interpreter_kernels.sort_kernel, (1,), arguments)
    wide = source.astype(np.float32)
    assert (output[0] == -np.sort(-wide, axis=1)).all()
    assert (output[1] == np.cumsum(wide, axis=1)[:, ::-1]).all()


@interpreted
def test_failure_names_the_program_and_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        interpreter.launch(interpreter_kernels.failing_kernel, (4,), [("BAD", 2)])
    assert caught.value.__notes__ == ["in program (2, 0, 0) of kernel failing_kernel, grid (4, 1, 1)"]
    # The language is itself again, and the next launch works.
    with pytest.raises(ValueError, match="_semantic"):
        interpreter_kernels.tl.arange(0, 4)
    interpreter.launch(interpreter_kernels.failing_kernel, (4,), [("BAD", 9)])


@interpreted
def test_threads_take_turns() -> None:
    outputs = [np.zeros(64, np.int32) for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(3):
            arguments = [("output", _pointer(outputs[number])), ("number", Scalar(number))]
            interpreter.launch(interpreter_kernels.slow_kernel, (64,), arguments)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, output in enumerate(outputs):
        assert (output == 3 * (np.arange(64) * 10 + number)).all()


@interpreted
def test_installing_twice_changes_nothing() -> None:
    from triton.runtime import interpreter as triton_interpreter

    interpreter.install()
    builder = triton_interpreter.interpreter_builder
    interpreter.install()
    assert triton_interpreter.interpreter_builder is builder


@interpreted
def test_needs_no_framework() -> None:
    printed = _python(
        "-c",
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "import numpy as np\n"
        "from moe_core.runtime.interpreter import HostPointer, launch\n"
        "from tests.support.runtime import interpreter_kernels\n"
        "output = np.zeros(8, np.float32)\n"
        "launch(interpreter_kernels.nested_kernel, (1,), [('output', HostPointer(output.ctypes.data, 'float32'))])\n"
        "print(output[0])",
    )
    assert printed == "28.0\n"


@interpreted
def test_unsupported_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.5.1", "3.10.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        with pytest.raises(Unsupported, match=rf"supports Triton 3\.6 to 3\.9, got {version}; install one of these"):
            interpreter.require_interpreter()
    monkeypatch.setattr(triton, "__version__", "3.7.0+git1234")
    interpreter.require_interpreter()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match=r"needs TRITON_INTERPRET=1 .* got 'nothing'; set it and start a new process"):
        interpreter.require_interpreter()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="needs Triton, which is not installed here"):
        interpreter.require_interpreter()


@interpreted
def test_kernels_imported_too_early_are_refused() -> None:
    compiled = triton.JITFunction(interpreter_faults.sum_kernel.fn)
    with pytest.raises(Unsupported, match="'sum_kernel' was imported before TRITON_INTERPRET=1 was set"):
        interpreter.launch(compiled, (1,), [])


@interpreted
def test_tritons_own_launches_still_work() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(256, dtype=torch.int32).reshape(64, 4).bfloat16() % 4
    output = torch.zeros(4, dtype=torch.bfloat16)
    interpreter.install()
    interpreter_faults.sum_kernel[(1,)](output, values)
    assert output.tolist() == [0, 64, 128, 192]
