"""How published checkpoints store one quantised matrix: tensor names, dtypes, shapes, and the way to our arrays and back.

Everything here is a permutation of bits: no number changes. Our arrays are `QuantizedTensor`'s, `out_in`: rows N are
outputs, columns D inputs, as in every file.

| method | values | scales | zero points |
|---|---|---|---|
| mxfp4 (gpt-oss) | `_blocks` uint8 `[N, D/32, 16]` | `_scales` uint8 `[N, D/32]` | |
| fp8 (DeepSeek) | `.weight` e4m3 `[N, D]` | `.weight_scale_inv` `[ceil(N/128), ceil(D/128)]` | |
| compressed-tensors pack-quantized | `.weight_packed` int32 `[N, D*bits/32]` | `.weight_scale` `[N, G]` | `.weight_zero_point` int32 `[N*bits/32, G]` |
| int-quantized, float-quantized | `.weight` int8, e4m3 `[N, D]` | `.weight_scale` | |
| mxfp4-pack-quantized, mxfp8-quantized | `.weight_packed` uint8 `[N, D/2]`, `.weight` e4m3 | `.weight_scale` uint8 `[N, D/32]` | |

The words of pack-quantized hold their elements from the lowest bits up (element i of 4 bits in bits 4i), as unsigned
codes: q + 8 or q + 128 for signed q, so that zero points keep their difference. Zero points are packed along N.
"""  # noqa: E501 - a table row does not break

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_GROUP, FP8_TOKEN, INT8_TOKEN, Format, Scheme, format_names
from moe_core.formats.tensor import QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.quantize.reference import dequantize

_SCALE_HEADERS = ("F32", "BF16", "F16")
_E8M0_HEADERS = ("U8", "F8_E8M0")
_ELEMENT_HEADERS = {"e4m3": ("F8_E4M3",), "int8": ("I8",), "e2m1": ("U8", "I8")}
_WORD_BITS, _WORD_BYTES = 32, 4
_MX_BYTES = 16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Component:
    """One tensor of a quantised matrix.

    field: of QuantizedTensor, or any name for `Packing.plain`. suffix: after the module's name. accepts: header dtypes.
    file_shape: of the tensor of a matrix (N, D). None: any. decode, encode: convert between the file's array and ours,
    for any number of leading axes. None: the same. decode may add the padding of the last word. dtype: of the decoded
    array, where the file's tells nothing.
    """

    field: str
    suffix: str
    accepts: tuple[str, ...]
    file_shape: Callable[[int, int], Shape] | None
    decode: Callable[[np.ndarray], np.ndarray] | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    optional: bool = False
    dtype: str | None = None


@dataclass(frozen=True)
class Packing:
    """The storage of a checkpoint's quantised matrices.

    Args:
        scheme: None: no format of ours holds the numbers, and `plain` gives them.
        settings: the checkpoint's `quantization_config`.
        plain: (component arrays by field, N, D) -> fp32 `[..., N, D]`. None: they are a QuantizedTensor's.
        label: for messages. "": the format's name.
        static: files hold the scale of the activations.
        permuted: the same packing where `g_idx` does not count groups in order.
        companions: suffixes of further tensors that may be there.
        tag: the `_type` in torchao's metadata, or "".
    """

    scheme: Scheme | None
    components: tuple[Component, ...]
    settings: Mapping[str, Any]
    stores_shape: bool = False
    plain: Callable[[Mapping[str, np.ndarray], int, int], np.ndarray] | None = None
    label: str = ""
    static: bool = False
    permuted: Packing | None = None
    companions: tuple[str, ...] = ()
    tag: str = ""
    notes: tuple[str, ...] = ()

    @property
    def format(self) -> Format:
        assert self.scheme is not None
        return self.scheme.weights

    def __str__(self) -> str:
        return self.label or self.format.name

    def dequantize(self, arrays: Mapping[str, np.ndarray], rows: int, columns: int) -> np.ndarray:
        """fp32 `[..., N, D]` of decoded component arrays."""
        if self.plain is not None:
            return self.plain(arrays, rows, columns)
        values = arrays["values"][..., : columns // self.format.own_element.per_byte]
        points = arrays.get("zero_points")
        points = None if points is None else points[..., : -(-rows // self.format.own_element.per_byte), :]
        scales = arrays["scales"]
        if dtypes.canonical(scales.dtype) not in self.format.scale_dtypes:
            scales = scales.astype(np.float32)
        return dequantize(QuantizedTensor(QuantizedSpec(self.format), values, scales, points))

    @property
    def method(self) -> str:
        return self.settings["quant_method"]

    def tensor_name(self, module: str, component: Component, fused: bool) -> str:
        """The tensor of a module. fused: it has no `.weight`, as `experts.gate_up_proj_scale_inv`."""
        return module + (component.suffix.removeprefix(".weight") if fused else component.suffix)

    def tensors(self, module: str, tensor: QuantizedTensor, fused: bool) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of the tensors of a matrix `[N, D]`, or fused a stack `[E, N, D]`, that is not prepacked."""
        if tensor.spec.tiling is not None:
            raise InvalidInput(f"{module} must be in its published layout, got {tensor}; call restore_weights")
        for component in self.components:
            array = getattr(tensor, component.field)
            encoded = array if component.encode is None else component.encode(array)
            yield self.tensor_name(module, component, fused), np.ascontiguousarray(encoded)
        if self.stores_shape:
            yield module + ("_shape" if fused else ".weight_shape"), np.array(tensor.shape, np.int64)


def mxfp4_packing(scheme: Scheme, settings: Mapping[str, Any]) -> Packing:
    """gpt-oss: 16 bytes of two elements in an axis of their own."""
    values = Component(
        "values",
        "_blocks",
        ("U8",),
        lambda rows, columns: (rows, columns // (2 * _MX_BYTES), _MX_BYTES),
        decode=lambda blocks: blocks.reshape(*blocks.shape[:-2], -1),
        encode=lambda packed: packed.reshape(*packed.shape[:-1], -1, _MX_BYTES),
    )
    return Packing(scheme, (values, _e8m0_scales(scheme.weights, "_scales")), settings)


def plain_packing(scheme: Scheme, settings: Mapping[str, Any], scale_suffix: str = ".weight_scale") -> Packing:
    """Values and scales as in our arrays: fp8, int-quantized, float-quantized, mxfp4-pack, mxfp8."""
    format = scheme.weights
    suffix = ".weight" if format.own_element.per_byte == 1 else ".weight_packed"
    values = Component("values", suffix, _ELEMENT_HEADERS[format.element], _shape(format, "values"))
    if format.has_e8m0_scales:
        scales = _e8m0_scales(format, scale_suffix)
    elif format.group_rows is None:
        # One scale per tensor: files have `[1]` for a matrix, `[E, 1]` for a stack.
        decode, encode = (lambda scale: scale[..., None]), (lambda scale: scale[..., 0])
        scales = Component("scales", scale_suffix, _SCALE_HEADERS, lambda rows, columns: (1,), decode, encode)
    else:
        # e8m0 scales of DeepSeek's later files become numbers.
        scales = Component("scales", scale_suffix, (*_SCALE_HEADERS, "F8_E8M0"), _shape(format, "scales"))
    return Packing(scheme, (values, scales), settings)


def words_packing(scheme: Scheme, settings: Mapping[str, Any]) -> Packing:
    """compressed-tensors pack-quantized: codes in int32 words along D, zero points along N."""
    format = scheme.weights
    bits = format.bits_per_element

    def words(size: int) -> int:
        return -(-size * bits // _WORD_BITS)

    def points_to_words(packed: np.ndarray) -> np.ndarray:
        rows, groups = packed.shape[-2:]
        whole = np.zeros((*packed.shape[:-2], -(-rows // _WORD_BYTES) * _WORD_BYTES, groups), np.uint8)
        whole[..., :rows, :] = packed
        bytes_of_words = whole.reshape(*packed.shape[:-2], -1, _WORD_BYTES, groups).swapaxes(-1, -2)
        return np.ascontiguousarray(bytes_of_words).view("<i4")[..., 0]

    def words_to_points(array: np.ndarray) -> np.ndarray:
        as_bytes = np.ascontiguousarray(array)[..., None].view(np.uint8).swapaxes(-1, -2)
        return as_bytes.reshape(*array.shape[:-2], -1, array.shape[-1])

    def pad_to_words(packed: np.ndarray) -> np.ndarray:
        whole = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % _WORD_BYTES)])
        return np.ascontiguousarray(whole).view("<i4")

    def words_to_bytes(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).view(np.uint8)

    scales_shape = _shape(format, "scales")

    def points_shape(rows: int, columns: int) -> Shape:
        return words(rows), scales_shape(rows, columns)[1]

    shapes = (lambda rows, columns: (rows, words(columns))), words_to_bytes, pad_to_words
    values = Component("values", ".weight_packed", ("I32",), *shapes)
    scales = Component("scales", ".weight_scale", _SCALE_HEADERS, scales_shape)
    points = Component("zero_points", ".weight_zero_point", ("I32",), points_shape, words_to_points, points_to_words)
    components = (values, scales, points) if format.zero_points else (values, scales)
    return Packing(scheme, components, settings, stores_shape=True)


def _shape(format: Format, field: str) -> Callable[[int, int], Shape]:
    return lambda rows, columns: getattr(quantized_shapes(QuantizedSpec(format), (rows, columns)), field)


def _e8m0_scales(format: Format, suffix: str) -> Component:
    # Bytes are viewed, never converted.
    return Component("scales", suffix, _E8M0_HEADERS, _shape(format, "scales"), lambda scale: scale.view(np.uint8))


def packing_for(format: Format, interleaved: bool, compressed: bool = True) -> Packing:
    """Storage for a converter. interleaved: gpt-oss. compressed: mxfp8 of compressed-tensors. Raises Unsupported."""
    element, arguments, scheme = format.element, _arguments(format), functools.partial(Scheme, format.name, format)
    if element == "e2m1" and interleaved:
        return mxfp4_packing(scheme(), {"quant_method": "mxfp4"})
    if element == "e2m1":
        return plain_packing(scheme(), compressed_settings("mxfp4-pack-quantized", arguments))
    if element in ("uint4", "uint8"):
        return words_packing(scheme(), compressed_settings("pack-quantized", arguments))
    tokens = {"num_bits": 8, "type": arguments["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    if element == "int8":
        return plain_packing(scheme(INT8_TOKEN), compressed_settings("int-quantized", arguments, tokens))
    if format.has_e8m0_scales and compressed:
        return plain_packing(
            scheme(format), compressed_settings("mxfp8-quantized", arguments, arguments | {"dynamic": True})
        )
    if format.has_e8m0_scales or format.group_rows == format.group_columns == FP8_GROUP.group_columns:
        settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        settings |= {"weight_block_size": [format.group_rows, format.group_columns]}
        settings |= {"scale_fmt": "ue8m0"} if format.has_e8m0_scales else {}
        activations = format if format.has_e8m0_scales else FP8_GROUP
        return plain_packing(scheme(activations), settings, ".weight_scale_inv")
    if format.group_columns is None and format.group_rows is not None:
        # vLLM has no fp8 experts per channel that multiply plain rows.
        return plain_packing(scheme(FP8_TOKEN), compressed_settings("float-quantized", arguments, tokens))
    if format.group_columns is None:
        return plain_packing(scheme(), compressed_settings("float-quantized", arguments))
    raise Unsupported(
        f"format must be one that checkpoints store weights in, got {format.name}; the formats are "
        f"{', '.join(format_names())}"
    )


def _arguments(format: Format) -> dict[str, Any]:
    whole = "tensor" if format.group_rows is None else "channel"
    arguments: dict[str, Any] = {
        "num_bits": format.bits_per_element,
        "type": "int" if "int" in format.element else "float",
        "symmetric": not format.zero_points,
        "strategy": whole if format.group_columns is None else "group",
        "group_size": format.group_columns,
        "dynamic": False,
    }
    return arguments | ({"scale_dtype": "torch.uint8"} if format.has_e8m0_scales else {})


def compressed_settings(
    kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": kind}
    settings = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return settings | {"config_groups": {"group_0": group}}
