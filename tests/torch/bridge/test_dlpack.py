"""Arrays of other libraries in torch through DLPack: shared memory, every dtype that travels, and clear refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch import InvalidInput
from moe_torch.bridge.options import TORCH_DTYPES
from tests.support.torch import require_equal, running_on, to_torch, torch_layer

NUMPY_DTYPES = ("float32", "float16", "float64", "int64", "int32", "int8", "uint32", "uint8", "bool")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_arrays_share_their_memory(dtype: str) -> None:
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    tensor = moe_torch.from_dlpack(array)
    assert tensor.dtype == TORCH_DTYPES[dtype] and tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()
    array[0, 0] = 1
    assert tensor[0, 0].item() == 1


def test_strides_and_offsets_travel() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::2]
    tensor = moe_torch.from_dlpack(array)
    assert tensor.shape == (3, 3) and tensor.stride() == (6, 2) and tensor.tolist() == array.tolist()
    assert moe_torch.from_dlpack(np.ones(())).shape == ()
    assert moe_torch.from_dlpack(np.zeros((0, 4), np.float32)).shape == (0, 4)


def test_memory_lives_as_long_as_the_tensor() -> None:
    tensor = moe_torch.from_dlpack(np.full(100_000, 7, np.int32))
    for _ in range(4):
        np.full(100_000, 1, np.int32)
    assert (tensor == 7).all()


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn"])
def test_jax_arrays_share_their_memory(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        array = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    tensor = moe_torch.from_dlpack(array)
    assert tensor.dtype == TORCH_DTYPES[dtype] and tensor.data_ptr() == array.unsafe_buffer_pointer()
    require_equal(tensor.cpu().float(), torch.tensor(np.asarray(array).astype(np.float32)), dtype)
    assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(tensor)), np.asarray(array))


def test_jax_arrays_through_an_op() -> None:
    jax = pytest.importorskip("jax")
    with running_on("reference"), jax.default_device(jax.devices("cpu")[0]):
        layer = torch_layer()
        x, weight = (
            moe_torch.from_dlpack(jax.numpy.asarray(array.numpy())) for array in (layer.x, layer.routing.weight)
        )
        logits = moe_torch.router(x, weight)
        require_equal(logits, moe_torch.router(layer.x, layer.routing.weight), "logits")
        assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(logits)), logits.numpy())


def test_torch_tensors_come_back() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    assert moe_torch.from_dlpack(tensor).data_ptr() == tensor.data_ptr()


REFUSED: dict[str, tuple[Any, str]] = {
    "no exporter": ([1.0, 2.0], r"exporter must have __dlpack__ and __dlpack_device__, got list; pass an array of"),
    "NumPy bfloat16": (np.zeros(3, ml_dtypes.bfloat16), r"exporter must .*, got ndarray of bfloat16: .*cast it first"),
    "complex": (np.zeros(3, np.complex64), r"exporter must have one of the dtypes .*, got complex64; cast it first"),
    "byte order": (np.zeros(3, ">f4"),
        r"exporter must .* through DLPack, got ndarray of >f4: .*; detach or cast it first"),
    "text": (np.zeros(3, "S3"), r"exporter must .* through DLPack, got ndarray of \|S3: .*; detach or cast it first"),
    "negative strides": (np.zeros(4)[::-1], r"exporter must not have negative strides, got \(-1,\); copy it"),
    "gradients": (torch.zeros(3, requires_grad=True), r"exporter must .*, got Tensor of torch\.float32: .*; detach"),
    "sparse": (torch.eye(3).to_sparse(),
        r"exporter must .*, got Tensor of torch\.float32: .*; detach or cast it first"),
    "meta": (torch.zeros(3, device="meta"),
        r"exporter must .*, got Tensor of torch\.float32: .*; detach or cast it first"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused(name: str) -> None:
    exporter, pattern = REFUSED[name]
    with pytest.raises(InvalidInput, match=pattern):
        moe_torch.from_dlpack(exporter)


def test_jax_arrays_that_cannot_travel() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(InvalidInput, match=r"exporter must .*int4.*; detach or cast it first"):
        moe_torch.from_dlpack(jax.numpy.zeros(4, "int4"))
    deleted = jax.numpy.zeros(4)
    deleted.delete()
    with pytest.raises(InvalidInput, match=r"exporter must .*got ArrayImpl of float32"):
        moe_torch.from_dlpack(deleted)


class OnStream:
    """Exports a tensor from the stream that writes it."""

    def __init__(self, tensor: Any, stream: Any) -> None:
        self.tensor, self.stream = tensor, stream

    def __dlpack__(self, **options: Any) -> Any:
        with torch.cuda.stream(self.stream):
            return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.mark.gpu
def test_streams_are_ordered_without_synchronising() -> None:
    """The stream that reads waits for what the exporter's stream still has to write."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    big = torch.zeros(64 << 20, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 4):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(producer):
                for _ in range(20):
                    big.fill_(0)
                big.fill_(value)
            with torch.cuda.stream(consumer):
                mean = moe_torch.from_dlpack(OnStream(big, producer)).double().mean()
            producer.wait_stream(consumer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        consumer.synchronize()
        assert mean.item() == value


@pytest.mark.gpu
def test_jax_gpu_arrays_share_their_memory() -> None:
    jax = pytest.importorskip("jax")
    # The ones are an argument: constants would be summed on the host while XLA compiles, which takes a minute.
    array = jax.jit(jax.numpy.cumsum)(jax.numpy.ones(1 << 22))
    tensor = moe_torch.from_dlpack(array)
    assert tensor.is_cuda and tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert tensor[-1].item() == 1 << 22
    doubled = jax.dlpack.from_dlpack(tensor * 2)
    assert float(doubled[-1]) == 2 << 22


def test_copies_of_bfloat16_arrays_have_a_way() -> None:
    """The fix for NumPy's bfloat16: reinterpret the bytes."""
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    tensor = moe_torch.from_dlpack(array.view(np.uint8)).view(torch.bfloat16)
    require_equal(tensor, to_torch(array), "bfloat16")
