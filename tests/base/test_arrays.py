"""Array specs, and borrowed views of NumPy, torch and JAX arrays: zero-copy, with clear refusals."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base import dlpack, dtypes
from moe_core.base.arrays import ArraySpec, TensorView, contiguous_strides, host_array, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.runtime import cuda

BF16 = ml_dtypes.bfloat16


# Specs.


def test_specs_normalise_what_libraries_disagree_about() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert ArraySpec((2, 1, 4), "float32", (4, 99, 1)) == ArraySpec((2, 1, 4), "float32")
    assert ArraySpec((0, 3), "int32", (7, 7)) == ArraySpec((0, 3), "int32")
    spec = ArraySpec((2, 3), "bfloat16", (1, 2))
    assert (spec.is_contiguous, spec.nbytes, spec.rank, spec.size) == (False, 12, 2, 6)
    assert str(spec) == "bfloat16[2, 3] strides (1, 2)"


def test_dtypes_have_one_name() -> None:
    assert dtypes.canonical(BF16) == dtypes.canonical("bfloat16") == dtypes.canonical(np.dtype(BF16)) == "bfloat16"
    with pytest.raises(
        InvalidInput, match=r"dtype must be one of float32, .* got dtype\('complex64'\); convert the array"
    ):
        dtypes.canonical(np.dtype(np.complex64))


def test_require_spec_says_what_is_wrong() -> None:
    good = ArraySpec((5, 8), "float16")
    assert require_spec("x", good, ("num_tokens", 8), ("bfloat16", "float16")) is good
    cases = [
        (None, ("num_tokens", 8), "x must be [num_tokens, 8] of bfloat16 or float16, got None; pass the array"),
        (ArraySpec((2, 5, 8), "float16"), ("num_tokens", 8), "got (2, 5, 8); flatten the leading axes first"),
        (ArraySpec((8,), "float16"), ("num_tokens", 8), "got (8,); reshape it"),
        (ArraySpec((5, 9), "float16"), ("num_tokens", 8), "x must be [num_tokens, 8], got (5, 9); pass an array of"),
        (ArraySpec((5, 8), "float32"), ("num_tokens", 8), "must be bfloat16 or float16, got float32; cast it to"),
        (ArraySpec((5, 8), "float16", (1, 5)), ("num_tokens", 8), "must be row-major contiguous, got strides (1, 5);"),
    ]
    for spec, shape, message in cases:
        with pytest.raises(InvalidInput) as caught:
            require_spec("x", spec, shape, ("bfloat16", "float16"))
        assert message in str(caught.value)


# NumPy.


@pytest.mark.parametrize("name", [name for name in dtypes._NAMES if name not in ("bfloat16", "float8_e4m3fn")])
def test_numpy_through_dlpack(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(name)
    view = TensorView.from_dlpack(array)
    assert "owner" not in repr(view) and "dltensor" not in repr(view)
    assert (view.data_ptr(), view.device, view.read_only) == (array.ctypes.data, ("cpu", 0), False)
    assert view.spec == ArraySpec((2, 3), name)
    view.numpy()[0, 0] = 1
    assert array[0, 0] == 1


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda array: array.T,
    "sliced": lambda array: array[1:, 1:3],
    "strided": lambda array: array[::2, ::3],
    "reversed": lambda array: array[::-1, ::-1],
    "broadcast": lambda array: np.broadcast_to(array[:1], (5, 4)),
    "empty": lambda array: array[:0],
    "scalar": lambda array: np.array(array[1, 2]),
    "one row": lambda array: array[1:2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("enter", [TensorView.from_dlpack, TensorView.from_numpy])
def test_layouts_are_kept(layout: str, enter: Callable[[np.ndarray], TensorView]) -> None:
    array = LAYOUTS[layout](np.arange(16, dtype=np.int32).reshape(4, 4))
    view = enter(array)
    assert view.spec.shape == array.shape
    if array.size:
        assert view.pointer == array.ctypes.data
        assert view.numpy().ctypes.data == array.ctypes.data
    assert np.array_equal(view.numpy(), array)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(sorted(dtypes._NAMES)),
    axes=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
)
def test_any_view_comes_back(shape: list[int], dtype: str, axes: Any, step: int) -> None:
    base = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtypes.numpy_dtype(dtype))
    order = list(range(base.ndim))
    axes.shuffle(order)
    array = base.transpose(order)[::step] if base.ndim else base
    again = TensorView.from_numpy(array).numpy()
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert np.array_equal(again.astype(np.float64), array.astype(np.float64))


def test_read_only_arrays_stay_read_only() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    for view in (TensorView.from_dlpack(array), TensorView.from_numpy(array)):
        assert view.read_only
        with pytest.raises(ValueError, match="read-only"):
            view.numpy()[0] = 1


def test_views_keep_memory_alive_and_let_it_go() -> None:
    for enter in (TensorView.from_dlpack, TensorView.from_numpy):
        array = np.arange(1000, dtype=np.int64)
        alive = weakref.ref(array)
        memory = enter(array).numpy()
        del array
        gc.collect()
        assert alive() is not None and memory[999] == 999
        del memory
        gc.collect()
        assert alive() is None


def test_host_array_of_nothing_needs_no_address() -> None:
    assert host_array(0, ArraySpec((0, 5), "bfloat16")).shape == (0, 5)
    memory = np.arange(4, dtype=np.uint16)
    assert host_array(memory.ctypes.data, ArraySpec((2, 2), "bfloat16", (1, 2))).view(np.uint16)[1, 0] == 1


def test_arrays_of_ml_dtypes_need_from_numpy() -> None:
    array = np.ones((2, 2), BF16)
    with pytest.raises(InvalidInput, match=r"got ndarray of bfloat16: .*; detach or cast it .*TensorView.from_numpy"):
        TensorView.from_dlpack(array)
    view = TensorView.from_numpy(array)
    assert (view.pointer, view.spec) == (array.ctypes.data, ArraySpec((2, 2), "bfloat16"))
    assert view.numpy().dtype == BF16


def test_from_numpy_refusals() -> None:
    with pytest.raises(InvalidInput, match="array must be a NumPy array, got list; use from_dlpack for others"):
        TensorView.from_numpy([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match=r"native byte order, got dtype\('>f4'\); call .astype\('float32'\) first"):
        TensorView.from_numpy(np.zeros(3, ">f4"))
    packed = np.zeros(4, np.dtype([("a", np.int8), ("b", np.int32)]))["b"]
    with pytest.raises(InvalidInput, match=r"multiples of its 4-byte elements, got \(5,\) bytes; copy it first"):
        TensorView.from_numpy(packed)
    with pytest.raises(InvalidInput, match="dtype must be one of"):
        TensorView.from_numpy(np.zeros(3, np.complex64))


@pytest.mark.parametrize(("dtype", "name"), [(np.complex64, "complex64"), (np.complex128, "complex128")])
def test_dtypes_that_plans_do_not_have(dtype: type, name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"must have one of the dtypes int8, .*, got {name}; cast it first"):
        TensorView.from_dlpack(np.zeros(3, dtype))


@pytest.mark.parametrize("exporter", [[1, 2], None, 3.0, "array"])
def test_objects_without_dlpack(exporter: object) -> None:
    with pytest.raises(
        InvalidInput, match=rf"must have __dlpack__ .*, got {type(exporter).__name__}; pass an array of"
    ):
        TensorView.from_dlpack(exporter)


# Other exporters of the protocol, made from NumPy's capsules.


class Exporter:
    """An array whose capsule says what a test wants; records the streams it is asked for."""

    def __init__(self, device: tuple[int, int] = (1, 0), versioned: bool = True, **changes: Any) -> None:
        self.array = np.arange(8, dtype=np.int32)
        self.device, self.versioned, self.changes = device, versioned, changes
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {sorted(options)}")
        self.streams.append(stream)
        if self.versioned:
            assert options == {"max_version": (1, 0), "copy": False}
            capsule = self.array.__dlpack__(max_version=(1, 0))
            managed = dlpack._Versioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned"))
            managed.major = self.changes.get("major", managed.major)
            tensor = managed.tensor
        else:
            capsule = self.array.__dlpack__()
            tensor = dlpack._Tensor.from_address(dlpack._get_pointer(capsule, b"dltensor"))
        tensor.device.kind, tensor.device.index = self.device
        tensor.byte_offset = self.changes.get("byte_offset", 0)
        for name in ("code", "bits", "lanes"):
            setattr(tensor.dtype, name, self.changes.get(name, getattr(tensor.dtype, name)))
        if self.changes.get("packed"):
            tensor.strides = ctypes.POINTER(ctypes.c_int64)()
        return capsule


@pytest.mark.parametrize("versioned", [True, False])
def test_both_protocols_with_offsets_and_without_strides(versioned: bool) -> None:
    exporter = Exporter(versioned=versioned, byte_offset=4, packed=True)
    view = TensorView.from_dlpack(exporter)
    assert view.pointer == exporter.array.ctypes.data + 4
    assert view.spec == ArraySpec((8,), "int32")
    assert exporter.streams == [None]


@pytest.mark.parametrize(("given", "passed"), [(None, 1), (0, 1), (1, 1), (2, 2), (0x7F00, 0x7F00), (-1, -1)])
def test_cuda_exporters_hear_the_stream(given: int | None, passed: int) -> None:
    exporter = Exporter(device=(2, 3))
    view = TensorView.from_dlpack(exporter, stream=given)
    assert exporter.streams == [passed]
    assert view.device == ("cuda", 3)
    with pytest.raises(Unsupported, match=r"numpy\(\) needs an array on the CPU, got device \('cuda', 3\); copy it"):
        view.numpy()


@pytest.mark.parametrize(("field", "values"), [("shape", (2.5,)), ("shape", 3), ("strides", ("1",))])
def test_shapes_are_integers(field: str, values: Any) -> None:
    with pytest.raises(InvalidInput, match=f"{field} must be a tuple of integers, got {type(values).__name__}; pass"):
        ArraySpec(**{"shape": (3,), "dtype": "int32", field: values})


def test_page_locked_memory_is_host_memory() -> None:
    exporter = Exporter(device=(3, 0))
    assert TensorView.from_dlpack(exporter).device == ("cpu", 0)
    assert exporter.streams == [None]


#: DLDeviceType of dlpack.h.
OTHER_DEVICES = {
    **{4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 13: "CUDA managed", 14: "oneAPI"},
    **{0: "unknown", 99: "unknown"},
}


@pytest.mark.parametrize(("kind", "name"), OTHER_DEVICES.items())
def test_other_devices_are_refused(kind: int, name: str) -> None:
    with pytest.raises(Unsupported, match=rf"on a CPU or a CUDA device, got {name} \(DLPack device {kind}\); move"):
        TensorView.from_dlpack(Exporter(device=(kind, 0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 4}, r"elements of 1 lane, got 4; view it as a scalar dtype first"),
        ({"code": 12, "bits": 8}, r"got float8_e5m2; cast it first \(sub-byte data travels packed as uint8\)"),
        ({"code": 17, "bits": 4}, "got float4_e2m1fn; cast it first"),
        ({"code": 99, "bits": 8}, "got DLPack code 99 of 8 bits; cast it first"),
        ({"code": 0, "bits": 4}, "got int4; cast it first"),
    ],
)
def test_elements_that_cannot_travel(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TensorView.from_dlpack(Exporter(**changes))


def test_newer_protocols_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"DLPack version must be at most 1.x, got 2\.\d+; ask the exporter for"):
        TensorView.from_dlpack(Exporter(major=2))


def test_what_is_no_capsule_is_refused() -> None:
    class Confused(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            return 7

    with pytest.raises(InvalidInput, match="must return a capsule that nobody has consumed, got 7; export it again"):
        TensorView.from_dlpack(Confused())


# torch.


@pytest.mark.parametrize("name", dtypes._NAMES)
def test_torch_arrays(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for array in (tensor, tensor.T, tensor[:, 1:], tensor[:0]):
        view = TensorView.from_dlpack(array)
        assert view.spec == ArraySpec(array.shape, name, array.stride())
        assert view.pointer == array.data_ptr()
        assert view.numpy().astype(np.float64).tolist() == array.double().tolist()
    view = TensorView.from_dlpack(tensor)
    view.numpy()[0, 0] = 1
    assert tensor[0, 0] == 1
    assert not view.read_only


def test_torch_refusals() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match=r"got Tensor of torch.float32: .*require grad.*; detach or cast it first"):
        TensorView.from_dlpack(torch.zeros(3, requires_grad=True))
    with pytest.raises(InvalidInput, match=r"got Tensor of torch.float32: .*meta.*"):
        TensorView.from_dlpack(torch.zeros(3, device="meta"))
    with pytest.raises(InvalidInput, match="got complex64; cast it first"):
        TensorView.from_dlpack(torch.zeros(3, dtype=torch.complex64))


# JAX.


JAX_DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int8", "uint32", "bool"]


@pytest.mark.parametrize("name", JAX_DTYPES)
def test_jax_arrays(name: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.numpy.ones(shape, name) for shape in ((2, 3), (0, 3), ())]
    for array in arrays:
        view = TensorView.from_dlpack(array)
        assert (view.spec, view.device) == (ArraySpec(array.shape, name), ("cpu", 0))
        if array.size:
            assert view.pointer == array.unsafe_buffer_pointer()
        assert view.numpy().astype(np.float64).tolist() == np.ones(array.shape).tolist()


def test_jax_refusals() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(InvalidInput, match=r"got \w+ of int4: "):
        TensorView.from_dlpack(jax.numpy.ones(3, "int4"))
    with pytest.raises(InvalidInput, match=r"must have __dlpack__ .*, got \w*Tracer; pass"):
        jax.jit(TensorView.from_dlpack)(jax.numpy.ones(3))


# A GPU.


def read_from_gpu(view: TensorView) -> list[Any]:
    """The elements of a dense view on a GPU, copied by the CUDA driver from the address the view holds."""
    driver, memory = cuda.driver(), np.empty(view.spec.nbytes, np.uint8)
    target, source = ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(view.pointer)
    size = ctypes.c_size_t(memory.size)
    code = driver.within(view.device[1], driver.lib.cuMemcpyDtoH_v2, target, source, size)
    driver.check(code, "copying from the device")
    return host_array(memory.ctypes.data, view.spec, owner=memory).astype(np.float64).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", dtypes._NAMES)
def test_torch_arrays_on_a_gpu(name: str) -> None:
    torch = pytest.importorskip("torch")
    host = torch.arange(24).reshape(4, 6).to(getattr(torch, name))
    tensor = host.to("cuda")
    for stream in (None, torch.cuda.Stream().cuda_stream):
        for array in (tensor, tensor.T, tensor[:, 1:], tensor[:0]):
            view = TensorView.from_dlpack(array, stream=stream)
            assert (view.pointer, view.device) == (array.data_ptr(), ("cuda", array.device.index))
            assert (view.spec, view.read_only) == (ArraySpec(array.shape, name, array.stride()), False)
    torch.cuda.synchronize()
    assert read_from_gpu(TensorView.from_dlpack(tensor)) == host.double().tolist()
    with pytest.raises(Unsupported, match=r"numpy\(\) needs an array on the CPU, got device \('cuda', 0\); copy it"):
        TensorView.from_dlpack(tensor).numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("name", JAX_DTYPES)
def test_jax_arrays_on_a_gpu(name: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cuda")[0]):
        arrays = [jax.numpy.ones(shape, name).block_until_ready() for shape in ((4, 6), (0, 3), ())]
    for array in arrays:
        view = TensorView.from_dlpack(array)
        assert (view.spec, view.device) == (ArraySpec(array.shape, name), ("cuda", 0))
        if array.size:
            assert view.pointer == array.unsafe_buffer_pointer()
            assert read_from_gpu(view) == np.ones(array.shape).tolist()


@pytest.mark.gpu
def test_page_locked_tensors_are_host_memory() -> None:
    torch = pytest.importorskip("torch")
    array = torch.arange(6).pin_memory()
    view = TensorView.from_dlpack(array)
    assert (view.pointer, view.device) == (array.data_ptr(), ("cpu", 0))
    assert view.numpy().tolist() == array.tolist()
