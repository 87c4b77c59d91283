"""Layouts of producers that store matrices in another order or in formats that no kernel takes.

Matrix [N, K] = [out, in], g = group along K.

| layout | tensors | value |
|---|---|---|
| awq `gemm` | `qweight` I32 [K, N/8], `qzeros` I32 [K/g, N/8], `scales` [K/g, N] | (q - z) s, nibbles of a word in awq's order |
| gptq | `qweight` I32 [K b/32, N], `qzeros` I32 [K/g, N b/32], `scales` [K/g, N], `g_idx` [K] | (q - z) s; v1 has z - 1 |
| fp4 | `weight` I8 [N, K/2], `scale` E8M0 [N, K/32] | two e2m1, low first |
| nvfp4 | `weight_packed` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale` | q (s / global) |
| modelopt nvfp4 | `weight` U8, `weight_scale`, `weight_scale_2` | q s s2 |
| bitsandbytes 4 bits | `weight` U8 [N K/2, 1], `weight.absmax`, `.quant_map`, `.quant_state.*` | map[q] absmax, high nibble first |
| bitsandbytes 8 bits | `weight` I8 [N, K], `SCB` F32 [N] | q SCB / 127 |
| hqq | `W_q` U8, `scale`, `zero`, `axis`, `group_size`, `nbits`, `shape` | (q - zero) scale, first half of rows in high nibbles |
| torchao | `_weight_qdata`, `_weight_scale`, `_weight_zero_point`; `_type` in the files' metadata | by type |
"""  # noqa: E501 - a table row does not break

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.checkpoint.packing import Component, Packing, Shape, plain_packing
from moe_core.formats import MXFP4, Format, Scheme, int4_grouped, int8_grouped
from moe_core.formats.tensor import QuantizedSpec, QuantizedTensor
from moe_core.ops.quantize.codes import pack_nibbles, unpack_nibbles
from moe_core.ops.quantize.reference import dequantize

_FLOATS, _WORD_BITS = ("F16", "BF16", "F32"), 32
#: The nibble of an awq word that holds each of its eight columns.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
#: Before version 2, gptq subtracted 1 from each zero point of a word of 4 or 8 bits.
_GPTQ_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
#: With scales in fp32, as they multiply.
NVFP4 = Format("nvfp4", "e2m1", 1, 16)
_HQQ_BITS = (8, 4, 2, 1)
#: Elements of a block of bitsandbytes.
_MOST_BLOCK = 2**16

Arrays = Mapping[str, np.ndarray]


def _swap(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(-1, -2))


def _grouped(bits: int, group_size: int | None, zero_points: bool) -> Scheme:
    format = (int4_grouped if bits == 4 else int8_grouped)(group_size, zero_points)
    return Scheme(f"{format.name}_weights", format)


def awq(bits: int, group_size: int | None, settings: Mapping[str, Any]) -> Packing:
    def codes(words: np.ndarray) -> np.ndarray:
        """`[..., K, N]` of words along N."""
        nibbles = unpack_nibbles(np.ascontiguousarray(words).view(np.uint8))
        return nibbles.reshape(*nibbles.shape[:-1], -1, 8)[..., _AWQ_NIBBLES].reshape(nibbles.shape)

    def values(words: np.ndarray) -> np.ndarray:
        return pack_nibbles(_swap(codes(words)))

    def points(words: np.ndarray) -> np.ndarray:
        return _swap(pack_nibbles(codes(words)))

    def groups(columns: int) -> int:
        return columns // (group_size or columns)

    components = (
        Component("values", ".qweight", ("I32",), lambda rows, columns: (columns, rows // 8), values),
        Component("scales", ".scales", _FLOATS, lambda rows, columns: (groups(columns), rows), _swap),
        Component("zero_points", ".qzeros", ("I32",), lambda rows, columns: (groups(columns), rows // 8), points),
    )
    return Packing(_grouped(bits, group_size, True), components, settings, label=f"awq int{bits}")


def gptq(bits: int, group_size: int | None, settings: Mapping[str, Any], first_version: bool) -> Packing:
    def as_bytes(words: np.ndarray) -> np.ndarray:
        return _swap(words).view(np.uint8)

    def points(words: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(words).view(np.uint32)
        words = words + _GPTQ_ONES[bits] if first_version else words
        return _swap(words.view(np.uint8))

    def words_of(size: int) -> int:
        return size * bits // _WORD_BITS

    def groups(columns: int) -> int:
        return -(-columns // (group_size or columns))

    components = (
        Component("values", ".qweight", ("I32",), lambda rows, columns: (words_of(columns), rows), as_bytes),
        Component("scales", ".scales", _FLOATS, lambda rows, columns: (groups(columns), rows), _swap),
        Component("zero_points", ".qzeros", ("I32",), lambda rows, columns: (groups(columns), words_of(rows)), points),
    )
    label = f"gptq int{bits}"
    return permuted(Packing(_grouped(bits, group_size, True), components, settings, label=label), ".g_idx")


def permuted(packing: Packing, suffix: str) -> Packing:
    """`packing` with a tensor that says the group of each column."""
    format = packing.format
    packed = format.own_element.per_byte == 2

    def plain(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        group = arrays["g_idx"].astype(np.int64)
        codes = unpack_nibbles(arrays["values"]) if packed else arrays["values"]
        codes = codes[..., :columns].astype(np.float32)
        zero = np.float32(format.own_element.zero_point)
        if "zero_points" in arrays:
            points = arrays["zero_points"]
            points = unpack_nibbles(points, -2) if packed else points
            zero = points[..., :rows, :].astype(np.float32)[..., group]
        return (codes - zero) * arrays["scales"].astype(np.float32)[..., group]

    index = Component("g_idx", suffix, ("I32",), lambda rows, columns: (columns,))
    other = dataclasses.replace(
        packing, components=(*packing.components, index), plain=plain, label=f"{packing} with permuted columns"
    )
    return dataclasses.replace(packing, permuted=other, companions=(*packing.companions, suffix))


def fp4(settings: Mapping[str, Any]) -> Packing:
    """DeepSeek-V4's experts: the tensors of mxfp4 under other names."""
    packing = plain_packing(Scheme("mxfp4_w4a16", MXFP4), settings, ".scale")
    values, scales = packing.components
    view = dataclasses.replace(
        values, suffix=".weight", accepts=("I8", "U8"), decode=lambda codes: codes.view(np.uint8)
    )
    return dataclasses.replace(packing, components=(view, scales), label="fp4")


def nvfp4(settings: Mapping[str, Any], modelopt: bool) -> Packing:
    def plain(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        whole = arrays["whole"].astype(np.float32).reshape(-1)[0]
        scales = arrays["scales"].astype(np.float32)
        with np.errstate(all="ignore"):
            scales = scales * whole if modelopt else scales / whole
        return dequantize(QuantizedTensor(QuantizedSpec(NVFP4), arrays["values"], scales))

    components = (
        Component("values", ".weight" if modelopt else ".weight_packed", ("U8",), lambda rows, k: (rows, k // 2)),
        Component("scales", ".weight_scale", ("F8_E4M3",), lambda rows, k: (rows, k // 16)),
        Component("whole", ".weight_scale_2" if modelopt else ".weight_global_scale", ("F32",), lambda rows, k: (1,)),
    )
    companions = (".input_scale",) if modelopt else (".input_global_scale",)
    return Packing(None, components, settings, plain=plain, label="nvfp4", companions=companions)


def bitsandbytes_4bit(settings: Mapping[str, Any], kind: str) -> Packing:
    def spread(scales: np.ndarray, block: int, size: int) -> np.ndarray:
        if not 0 < block <= _MOST_BLOCK or scales.size != -(-size // block):
            raise ValueError(f"{scales.size} scales of blocks of {block} for {size} numbers")
        return np.repeat(scales, block)[:size]

    def plain(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        state = json.loads(arrays["state"].tobytes())
        if list(state["shape"]) != [rows, columns] or state["quant_type"] != kind:
            raise ValueError(f"a quant_state of {state['quant_type']} {state['shape']}")
        codes = arrays["values"].reshape(-1)
        codes = np.stack([codes >> 4, codes & 15], -1).reshape(-1)
        absmax = arrays["absmax"].astype(np.float32)
        if "nested_absmax" in arrays:
            numbers = arrays["nested_map"].astype(np.float32)[arrays["absmax"]]
            blocks = spread(arrays["nested_absmax"].astype(np.float32), state["nested_blocksize"], numbers.size)
            absmax = numbers * blocks + np.float32(state["nested_offset"])
        factor = spread(absmax, state["blocksize"], codes.size)
        return (arrays["map"].astype(np.float32)[codes] * factor).reshape(rows, columns)

    absmax = ("F32", "U8", "F16", "BF16")
    components = (
        Component("values", ".weight", ("U8",), None),
        Component("absmax", ".weight.absmax", absmax, None),
        Component("map", ".weight.quant_map", ("F32",), lambda rows, columns: (16,)),
        Component("state", f".weight.quant_state.bitsandbytes__{kind}", ("U8",), None),
        Component("nested_absmax", ".weight.nested_absmax", ("F32",), None, optional=True),
        Component("nested_map", ".weight.nested_quant_map", ("F32",), lambda rows, columns: (256,), optional=True),
    )
    return Packing(None, components, settings, plain=plain, label=f"bitsandbytes {kind}")


def bitsandbytes_8bit(settings: Mapping[str, Any]) -> Packing:
    def plain(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        return arrays["values"].astype(np.float32) * arrays["scales"][:, None] * np.float32(1 / 127)

    components = (
        Component("values", ".weight", ("I8",), lambda rows, columns: (rows, columns)),
        Component("scales", ".SCB", ("F32",), lambda rows, columns: (rows,)),
    )
    label = "bitsandbytes int8"
    return Packing(None, components, settings, plain=plain, label=label, companions=(".weight_format",))


def hqq(settings: Mapping[str, Any]) -> Packing:
    def plain(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        bits, axis, group = (int(arrays[name].reshape(-1)[0]) for name in ("nbits", "axis", "group_size"))
        if bits not in _HQQ_BITS or axis not in (0, 1) or arrays["shape"].tolist() != [rows, columns]:
            raise ValueError(f"{bits} bits along axis {axis} of {arrays['shape'].tolist()}")
        codes = arrays["values"]
        shifts = range(8 - bits, -1, -bits)
        codes = np.concatenate([codes >> shift & 2**bits - 1 for shift in shifts])
        if codes.shape[axis] != group:
            raise ValueError(f"groups of {codes.shape[axis]} instead of {group}")
        zero, scale = (arrays[name].astype(np.float32) for name in ("zero", "scales"))
        wanted = (len(codes), 1) if axis else (1, codes.shape[1])
        if (zero.shape, scale.shape) != (wanted, wanted):
            raise ValueError(f"zero {zero.shape} and scale {scale.shape} instead of {wanted}")
        return ((codes.astype(np.float32) - zero) * scale).reshape(rows, columns)

    numbers = ("U8", "I32", "I64")
    components = (
        Component("values", ".W_q", ("U8",), None),
        Component("scales", ".scale", _FLOATS, None),
        Component("zero", ".zero", _FLOATS, None),
        *(Component(name, f".{name}", numbers, None) for name in ("nbits", "axis", "group_size")),
        Component("shape", ".shape", numbers, lambda rows, columns: (2,)),
    )
    described = "packing unpack_view_dtype view_as_float quant_scale quant_zero compute_dtype offload_meta optimize"
    described += " encoded_state_dict stores_quant_config channel_wise round_zero"
    companions = tuple(f".{name}" for name in described.split())
    return Packing(None, components, settings, plain=plain, label="hqq", companions=companions)


def torchao(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """One packing per type of tensor: 4 bits with floating zero points, fp8 and int8."""

    def int4(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        scales, zero = (arrays[name].astype(np.float32) for name in ("scales", "zero_points"))
        group = columns // scales.shape[1]
        codes = (unpack_nibbles(arrays["values"]).astype(np.int8) ^ 8).astype(np.float32) - 8
        return codes * np.repeat(scales, group, 1) + np.repeat(zero, group, 1)

    def blocks(arrays: Arrays, rows: int, columns: int) -> np.ndarray:
        def spread(name: str) -> np.ndarray:
            grid = arrays[name].astype(np.float32)
            grid = grid if grid.ndim == 2 else grid.reshape(-1, 1)
            return np.repeat(np.repeat(grid, rows // grid.shape[0], 0), columns // grid.shape[1], 1)

        codes = arrays["values"].astype(np.float32)
        codes = codes - spread("zero_points") if "zero_points" in arrays else codes
        return codes * spread("scales")

    def groups(name: str, suffix: str) -> Component:
        return Component(name, suffix, _FLOATS, None, _swap)

    def packing(tag: str, plain: Callable[..., np.ndarray], dtype: str, *others: Component) -> Packing:
        per_byte = 2 if dtype == "U8" else 1
        shape: Callable[[int, int], Shape] = lambda rows, columns: (rows, columns // per_byte)  # noqa: E731
        values = Component("values", "._weight_qdata", (dtype,), shape)
        return Packing(None, (values, *others), settings, plain=plain, label=f"torchao {tag}", tag=tag)

    scales = Component("scales", "._weight_scale", _FLOATS, None)
    return (
        packing(
            "Int4Tensor", int4, "U8", groups("scales", "._weight_scale"), groups("zero_points", "._weight_zero_point")
        ),
        packing("Float8Tensor", blocks, "F8_E4M3", scales),
        packing(
            "Int8Tensor",
            blocks,
            "I8",
            scales,
            Component("zero_points", "._weight_zero_point", ("I8", "I32", "I64", "F32"), None, optional=True),
        ),
    )
