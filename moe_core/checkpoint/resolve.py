"""Find out how each matrix of a layer is stored: its tensors, and the packing that config.json and they agree on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.checkpoint.packing import Component, Packing
from moe_core.checkpoint.rules import Quantization
from moe_core.checkpoint.stacks import LayerNames
from moe_core.checkpoint.storage import FLOATING, Part, StackReader, TensorIndex
from moe_core.errors import InvalidInput, Unsupported

#: Endings of tensors in any quantised storage.
_COMPANIONS = (
    *("_blocks", "_scales", "_scale", "_scale_inv", "_packed", "_zero_point", "_g_idx", "qweight", "qzeros", ".g_idx"),
    *("weight_scale_2", "_global_scale", "absmax", "quant_map", ".SCB", ".W_q", "_qdata", "weight_shape"),
)
_PLAIN = (".weight", ".bias")
#: The most elements of a tensor of any shape, beside a small matrix.
_SLACK = 2**16

ScaleCheck = Callable[[str, np.ndarray], None] | None


def module_of(tensor: str) -> tuple[str, bool]:
    """(module, True for a fused parameter of all experts) of a plain weight's name."""
    module = tensor.removesuffix(".weight")
    return module, module == tensor


def tensors_of(weight: str, index: TensorIndex) -> dict[str, str]:
    """suffix -> tensor of a weight's module, without biases."""
    module, fused = module_of(weight)
    if not fused:
        ends = {name.removeprefix(module): name for name in index.below(f"{module}.") if name != f"{module}.bias"}
        return {end: name for end, name in ends.items() if "." not in end[1:] or end.startswith(".weight.")}
    tensors = {}
    for name in index.below(module):
        rest = name.removeprefix(module)
        if rest != "_bias" and rest[:1] in ("", "_", "."):
            tensors[rest if rest.startswith(("_blocks", "_scales", ".")) else f".weight{rest}"] = name
    return tensors


class Resolver:
    """The packings of one layer's matrices."""

    def __init__(
        self, names: LayerNames, quantization: Quantization | None, index: TensorIndex, reader: StackReader
    ) -> None:
        self._names, self._quantization, self._index, self._reader = names, quantization, index, reader
        self.consumed: set[str] = set()
        self._met: dict[str, Packing | None] = {}

    def packing(self, part: Part) -> Packing | None:
        """None: the part is plain. Raises Unsupported if config.json and the tensors disagree."""
        if part.tensor not in self._met:
            self._met[part.tensor] = self._packing(part)
        return self._met[part.tensor]

    def _packing(self, part: Part) -> Packing | None:
        tensors = tensors_of(part.tensor, self._index)
        if list(tensors) == [".weight"] and self._reader.stored_dtype(part.tensor) in FLOATING:
            return None
        declared = () if self._quantization is None else self._quantization.packings(self._spellings(part.tensor))
        fits = [(self._fit(packing, part.tensor, tensors), packing) for packing in declared]
        best, packing = max(fits, key=lambda pair: pair[0], default=(0, None))
        if not best or packing is None:
            self._require_plain(part.tensor, tensors)
            return None
        packing = self._ordered(packing, part, tensors)
        self._require_described(packing, part, tensors)
        self.consumed |= set(tensors.values())
        return packing

    def _fit(self, packing: Packing, weight: str, tensors: Mapping[str, str]) -> int:
        """The number of tensors that the packing has."""
        if packing.tag and self._torchao_type(weight, tensors) != packing.tag:
            return 0
        present = [part for part in packing.components if part.suffix in tensors]
        if any(part.suffix == ".weight" and self._dtype(tensors, part) not in part.accepts for part in present):
            return 0
        return sum(1 + (self._dtype(tensors, part) in part.accepts) for part in present)

    def _dtype(self, tensors: Mapping[str, str], component: Component) -> str:
        return self._reader.stored_dtype(tensors[component.suffix])

    def _torchao_type(self, weight: str, tensors: Mapping[str, str]) -> str:
        name = tensors.get("._weight_qdata")
        if name is None:
            return ""
        described = self._reader.file_of(name).metadata().get(weight, "{}")
        try:
            kind = json.loads(described[:_SLACK]).get("_type")
        except (ValueError, RecursionError, AttributeError) as error:
            raise InvalidInput(
                f"the metadata of {weight} in {self._index.files[name]} must be JSON: {error}"
                "; write the checkpoint again"
            ) from error
        if kind not in ("Int4Tensor", "Float8Tensor", "Int8Tensor"):
            raise Unsupported(
                f"{name} in {self._index.files[name]} must belong to an Int4Tensor, Float8Tensor or Int8Tensor of "
                f"torchao by the file's metadata, got {kind!r}; dequantise the checkpoint to bfloat16 first"
            )
        return str(kind)

    def _ordered(self, packing: Packing, part: Part, tensors: Mapping[str, str]) -> Packing:
        """The packing for columns in order, or the permuted one if g_idx says so."""
        name = packing.permuted and tensors.get(packing.permuted.components[-1].suffix)
        if packing.permuted is None or name is None:
            return packing
        columns = part.shape[-1]
        group = packing.format.group_columns or columns
        if self._reader.stored_dtype(name) != "I32" or self._reader.stored_shape(name) != (columns,):
            raise InvalidInput(
                f"{name} in {self._index.files[name]} must be I32 [{columns}], got {self._reader.stored_dtype(name)} "
                f"{list(self._reader.stored_shape(name))}; download the checkpoint again"
            )
        index, groups = self._reader.tensor(name)[:], -(-columns // group)
        if np.array_equal(index, np.arange(columns) // group):
            return packing
        if index.size and not 0 <= index.min() <= index.max() < groups:
            raise InvalidInput(
                f"{name} in {self._index.files[name]} must hold groups from 0 to {groups - 1}, got {index.min()} to "
                f"{index.max()}; download the checkpoint again"
            )
        return packing.permuted

    def _require_plain(self, weight: str, tensors: Mapping[str, str]) -> None:
        for suffix, name in tensors.items():
            dtype = self._reader.stored_dtype(name)
            strange = suffix == ".weight" and self._quantization is not None and dtype not in FLOATING
            if not strange and (suffix in _PLAIN or not suffix.endswith(_COMPANIONS)):
                continue
            where = f"{name} in {self._index.files[name]} ({dtype})"
            if self._quantization is None:
                raise Unsupported(
                    f"{where} belongs to a quantised layer, for which config.json has no quantization_config; "
                    "dequantise the checkpoint to bfloat16 first"
                )
            declared = self._quantization.packings(self._spellings(weight))
            says = f"declares {' or '.join(map(str, declared))}" if declared else "declares nothing (targets, ignore)"
            stored = ", ".join(f"{end} {self._described(other)}" for end, other in sorted(tensors.items()))
            raise Unsupported(
                f"{where} belongs to a quantised tensor in a way that the quantization_config does not describe: it "
                f"{says} for {module_of(weight)[0]}, and the files hold {stored}; use the config.json that belongs to "
                "the weights, or dequantise the checkpoint to bfloat16 first"
            )

    def _described(self, name: str) -> str:
        return f"{self._reader.stored_dtype(name)} {list(self._reader.stored_shape(name))}"

    def _require_described(self, packing: Packing, part: Part, tensors: Mapping[str, str]) -> None:
        known = {component.suffix for component in packing.components} | set(packing.companions)
        known |= {".weight_shape"} if packing.stores_shape else set()
        if packing.stores_shape and (name := tensors.get(".weight_shape")):
            numbers = self._reader.stored_shape(name) in ((2,), (len(part.shape),))
            stored = self._reader.tensor(name)[:].tolist() if numbers else self._described(name)
            if stored not in (list(part.shape), list(part.shape[-2:])):
                raise InvalidInput(
                    f"{name} in {self._index.files[name]} must be {list(part.shape[-2:])} by config.json, got "
                    f"{stored}; use the config.json that belongs to the weights"
                )
        for suffix, name in tensors.items():
            if suffix not in known:
                raise Unsupported(
                    f"{name} in {self._index.files[name]} belongs to a quantised tensor in a way that the "
                    f"quantization_config does not describe: {packing} has {', '.join(sorted(known))}; dequantise the "
                    "checkpoint to bfloat16 first"
                )

    def _spellings(self, weight: str) -> dict[str, None]:
        """A module's names in the file, in transformers and in llm-compressor."""
        module, _ = module_of(weight)
        names = {module: None}
        if module.startswith(self._names.block):
            canonical = self._names.canonical + module.removeprefix(self._names.block)
            names |= {canonical: None}
            head, _, last = canonical.rpartition(".")
            if ".experts" in head and last in self._names.modules:
                projections = ("gate_proj", "up_proj", "down_proj")[-len(self._names.modules) :]
                names |= {f"{head}.{projections[self._names.modules.index(last)]}": None}
            names |= {f"{self._names.canonical}experts": None} if ".experts" in head else {}
        return names

    def refuse_unread(self, read: set[str]) -> None:
        """Raise Unsupported for quantised tensors of the block that nobody reads."""
        for name in self._index.below(self._names.block):
            if name.endswith(_COMPANIONS) and name not in read and name not in self.consumed:
                where = f"{name} in {self._index.files[name]}"
                if self._quantization is None:
                    raise Unsupported(
                        f"{where} ({self._reader.stored_dtype(name)}) belongs to a quantised layer, for which "
                        "config.json has no quantization_config; dequantise the checkpoint to bfloat16 first"
                    )
                raise Unsupported(
                    f"{where} belongs to a quantised tensor in a way that the quantization_config does not describe, "
                    "so it cannot be honoured; dequantise the checkpoint to bfloat16 first"
                )

    def component(self, part: Part, packing: Packing, component: Component, check: ScaleCheck) -> Part | None:
        """The file tensor of one component of a part. None: an optional one is absent."""
        module, fused = module_of(part.tensor)
        name = packing.tensor_name(module, component, fused)
        if component.optional and name not in self._index.files:
            return None
        rows, columns = part.shape[-2:]
        stored, decode = self._reader.stored_shape(name), component.decode
        if component.file_shape is None:
            shape = stored
            if math.prod(shape) > max(2 * rows * columns, _SLACK):
                raise InvalidInput(
                    f"{name} in {self._index.files[name]} must have at most {2 * rows * columns} elements, got "
                    f"{list(shape)}; download the checkpoint again"
                )
        else:
            shape = (*part.shape[:-2], *component.file_shape(rows, columns))
        if stored != shape and _squeezed(stored) == _squeezed(shape):
            shape, decode = stored, _reshaped(shape, component.decode)
        check = check if component.field in ("scales", "absmax", "whole") else None
        return Part(name, shape, part.place, decode, accepts=component.accepts, check=check)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _reshaped(shape: tuple[int, ...], decode: Callable[[np.ndarray], np.ndarray] | None) -> Callable[..., np.ndarray]:
    def reshape(array: np.ndarray) -> np.ndarray:
        array = array.reshape(shape)
        return array if decode is None else decode(array)

    return reshape


def scale_check(packing: Packing, index: TensorIndex) -> ScaleCheck:
    """A check that scales are finite and not zero."""
    exponents = packing.scheme is not None and packing.format.has_e8m0_scales

    def check(name: str, array: np.ndarray) -> None:
        problems = bad_scales(array, exponents)
        if problems:
            listed = " and ".join(f"{count} {kind}" for kind, count in problems.items())
            raise InvalidInput(
                f"{name} in {index.files[name]} must hold finite scales other than 0, got {listed} among {array.size}; "
                "download the checkpoint again, quantise it again, or pass allow_bad_scales=True to take them as they "
                "are"
            )

    return check


def bad_scales(array: np.ndarray, exponents: bool) -> dict[str, int]:
    """kind -> count. exponents: of bytes, where 255 is NaN."""
    if array.dtype == np.uint8:
        return {"NaN": count} if exponents and (count := int((array == 255).sum())) else {}
    numbers = array.astype(np.float32)
    counts = {"NaN": np.isnan(numbers).sum(), "infinite": np.isinf(numbers).sum(), "zero": (numbers == 0).sum()}
    return {kind: int(count) for kind, count in counts.items() if count}


def plain_part(part: Part, packing: Packing, resolver: Resolver, check: ScaleCheck) -> Part:
    """The part as numbers, put together from the tensors of its packing."""
    made = [(one.field, resolver.component(part, packing, one, check)) for one in packing.components]
    tensors = [(field, tensor) for field, tensor in made if tensor is not None]
    rows, columns = part.shape[-2:]

    def decode(*arrays: np.ndarray) -> Any:
        fields = {
            field: array if tensor.decode is None else tensor.decode(array)
            for (field, tensor), array in zip(tensors, arrays, strict=True)
        }
        for field, tensor in tensors:
            if tensor.check is not None:
                tensor.check(tensor.tensor, fields[field])
        try:
            with np.errstate(all="ignore"):
                numbers = packing.dequantize(fields, rows, columns)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise InvalidInput(
                f"{part.tensor.removesuffix('.weight')} must be stored as {packing}, got tensors that disagree: "
                f"{type(error).__name__}: {error!s:.200}; download the checkpoint again"
            ) from error
        return numbers if part.decode is None else part.decode(numbers)

    (_, first), *others = tensors
    rest = tuple(other for _, other in others)
    return dataclasses.replace(first, place=part.place, decode=decode, others=rest, check=None)
