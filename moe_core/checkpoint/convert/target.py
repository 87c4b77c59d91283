"""Targets of a conversion: the form of every expert's matrices, and who loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.base.checks import require_choice
from moe_core.checkpoint.convert.nvfp4 import Nvfp4, quantized_nvfp4
from moe_core.checkpoint.convert.source import MATRICES, Matrix, Storage
from moe_core.checkpoint.families import Architecture
from moe_core.checkpoint.layer import Checkpoint
from moe_core.checkpoint.layouts import NVFP4, nvfp4
from moe_core.checkpoint.packing import Packing, compressed_settings, packing_for
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, format_names, quantized_shapes
from moe_core.ops.quantize.reference import dequantize, quantize, quantize_rounded

LOADERS = ("transformers", "moebius")
#: llm-compressor's names below `experts.<e>.` in every family.
_MODULES = ("gate_proj", "up_proj", "down_proj")
#: The experts of any model in llm-compressor's and the published names, and nothing else.
_EXPERTS = r"re:.*[.]experts[.][0-9]+[.].*"
#: Families that transformers loads one expert at a time although it saves them fused.
_REPLACED = ("llama4_text",)
#: Families with merged convolutions.
_MERGED = ("bailing_hybrid", "glm5_next_text", "kimi_linear")
_BLOCK = 128
_HALVES = {"float16", "bfloat16"}
#: Weights of nvfp4 as compressed-tensors describes them.
_NVFP4 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": NVFP4.group_columns,
    "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """format: of quantised experts. dtype: of plain ones. packing: None for plain ones. loader: of LOADERS."""

    architecture: Architecture
    family: str
    format: Format | None
    dtype: str
    packing: Packing | None
    interleaved: bool = False
    loader: str = LOADERS[0]

    @classmethod
    def of(cls, checkpoint: Checkpoint, format: Format | str, dtype: str, loader: str) -> Target:
        """dtype: of the source's plain weights. Raises Unsupported if the loader reads no such files."""
        architecture, family = checkpoint.architecture, checkpoint.family
        require_choice("loader", loader, LOADERS)
        if isinstance(format, str):
            require_choice("format", format, (*dtypes.MATMUL_DTYPES, NVFP4.name, *format_names()))
            packing = nvfp4(compressed_settings("nvfp4-pack-quantized", _NVFP4), modelopt=False)
            plain = cls(architecture, family, None, format, None)
            target = plain if format != NVFP4.name else cls(architecture, family, NVFP4, dtype, packing)
        else:
            interleaved = family == "gpt_oss" and format.element == "e2m1"
            packing = packing_for(format, interleaved, loader == "moebius")
            target = cls(architecture, family, format, dtype, packing, interleaved)
        target = dataclasses.replace(target, loader=loader)
        reason = target.why_not_transformers() if loader == "transformers" else None
        if reason is not None:
            raise Unsupported(
                f"format must be one that transformers loads for {family}, got {format}: {reason}; this library "
                "reads it: pass loader='moebius' (--loader moebius)"
            )
        return target

    @property
    def modules(self) -> dict[str, str]:
        """MATRICES -> the module's name below `experts.<e>.`."""
        fields = MATRICES if self.architecture.spec.activation.gated else MATRICES[1:]
        return dict(zip(fields, self.architecture.naming.per_expert or _MODULES[-len(fields) :], strict=True))

    @property
    def together(self) -> list[tuple[str, ...]]:
        """MATRICES in the groups that are quantised together."""
        fields = tuple(self.modules)
        return [fields[:-1], fields[-1:]] if self.format == NVFP4 else [(field,) for field in fields]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """MATRICES -> [N, D] of an expert."""
        d_ff, width = self.architecture.d_ff, self.architecture.expert_width
        return {field: (width, d_ff) if field == "down" else (d_ff, width) for field in self.modules}

    def require_sizes(self, shared: tuple[str, ...]) -> None:
        """Raise for sizes that the format refuses and files that no loader reads. shared: names of tensors."""
        if self.format is None:
            return
        for field, shape in self.shapes().items():
            try:
                quantized_shapes(QuantizedSpec(self.format), shape)
            except InvalidInput as problem:
                raise InvalidInput(f"the experts' {self.modules[field]} cannot be quantised: {problem}") from problem
        joined = self.architecture.shared_d_ff > 0 and len(shared) < len(self.modules)
        if joined and not self.interleaved and not self.format.splits_rows(self.architecture.d_ff):
            raise Unsupported(
                f"format must split experts of width {self.architecture.d_ff} into gate and up beside shared experts "
                f"whose gate and up are one tensor, got {self.format.name}, which no loader reads there; int4_g32, "
                "mxfp4 and other formats with a scale per row or group do"
            )

    def why_not_transformers(self) -> str | None:
        """Why transformers 5.23 does not load these files, or None."""
        packing, format = self.packing, self.format
        if self.architecture.lacks_shared:
            return "the files hold none of the shared experts of config.json, which it would fill with random numbers"
        if packing is None or format is None or packing.method == "mxfp4":
            return None
        compressed = packing.method == "compressed-tensors"
        if self.architecture.naming.per_expert is None and not (compressed and self.family in _REPLACED):
            return "it leaves experts that are stored one by one random in this family, without an error"
        if format == NVFP4:
            return "it drops weight_global_scale and computes other numbers without an error, while vLLM 0.33 loads it"
        if format.zero_points:
            return "it refuses zero points of experts"
        if packing.settings.get("format") == "int-quantized":
            return "it loads 8-bit integers only packed, as int8_row, int8_g32, int8_g64 or int8_g128"
        if format.element != "e4m3" and self.family in _MERGED:
            return "it loses this family's convolutions beside packed experts"
        block = packing.settings.get("weight_block_size")
        odd = [size for shape in self.shapes().values() for size in shape if size > _BLOCK and size % _BLOCK]
        if block == [_BLOCK, _BLOCK] and odd:
            return f"it spreads block scales evenly, which is wrong for {odd[0]} rows or columns"
        return None

    # Matrices

    def converted(
        self, matrices: Mapping[str, Matrix], kept: Mapping[str, Nvfp4] | None = None
    ) -> dict[str, QuantizedTensor | Nvfp4]:
        """A group of `together` in the format. kept: of an nvfp4 source."""
        if self.format != NVFP4:
            return {field: self.quantized(matrix) for field, matrix in matrices.items()}
        if kept is not None and len({one.whole.item() for one in kept.values()}) == 1:
            return dict(kept)
        plain = {field: _plain(matrix) for field, matrix in matrices.items()}
        return dict(quantized_nvfp4(plain))

    def quantized(self, matrix: Matrix) -> QuantizedTensor:
        """The matrix in the format. Codes and scales of the same storage are kept."""
        assert self.format is not None
        if isinstance(matrix, QuantizedTensor) and self.keeps(matrix):
            written = self._kept_dtype(matrix.scales.dtype.name)
            scales = matrix.scales.astype(dtypes.numpy_dtype(written), copy=False)
            return matrix if scales is matrix.scales else dataclasses.replace(matrix, scales=scales)
        plain, scale_dtype = _plain(matrix), self._scale_dtype()
        if scale_dtype is None:
            return quantize(plain, self.format)

        def rounded(scales: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):
                result = scales.astype(dtypes.numpy_dtype(scale_dtype)).astype(np.float32)
            # A scale must not vanish: it divides.
            tiny = 1e-7 if scale_dtype == "float16" else 0.0
            return np.where(scales > 0, np.maximum(result, tiny), result)

        if self.format.zero_points:
            result = quantize(plain, self.format)
            return dataclasses.replace(result, scales=rounded(result.scales))
        return quantize_rounded(plain, self.format, rounded)

    def keeps(self, matrix: Matrix) -> bool:
        """True if codes and scales are written as they are."""
        return isinstance(matrix, QuantizedTensor) and self.format is not None and _same(matrix.format, self.format)

    def _scale_dtype(self) -> str | None:
        """Loaders of compressed-tensors give experts the dtype of their scales."""
        assert self.format is not None and self.packing is not None
        plain = self.packing.method != "compressed-tensors" or self.format.has_e8m0_scales or self.dtype == "float32"
        return None if plain else self.dtype

    def _kept_dtype(self, stored: str) -> str:
        """The dtype of kept codes' scales. transformers computes experts in it: of 16 bits, it is the checkpoint's."""
        assert self.format is not None and self.packing is not None
        is_theirs = self.packing.method == "compressed-tensors" and not self.format.has_e8m0_scales
        return self.dtype if is_theirs and self.loader == LOADERS[0] and stored in _HALVES else stored

    def zeros(self, shape: tuple[int, int], stored: Storage | None) -> QuantizedTensor | Nvfp4:
        """A matrix of an expert, without its numbers."""
        assert self.format is not None
        if stored is None or not _same(stored.format, self.format):
            return self.converted({"": np.zeros(shape, np.float32)})[""]
        return quantize(np.zeros(shape, np.float32), stored.format)

    def tensors(
        self, module: str, matrix: QuantizedTensor | Nvfp4, stored: Storage | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of a matrix in the files. stored: of the source's matrix."""
        assert self.packing is not None and self.format is not None
        if isinstance(matrix, Nvfp4):
            for component, array in zip(self.packing.components, matrix, strict=True):
                yield self.packing.tensor_name(module, component, False), array
            return
        kept = stored is not None and _same(stored.format, self.format)
        scale_dtype = self._kept_dtype(stored.scale_dtype) if kept and stored is not None else self._scale_dtype()
        for name, array in self.packing.tensors(module, matrix, fused=False):
            if name.endswith(("_scale", "_scale_inv")) and scale_dtype is not None:
                array = array.astype(dtypes.numpy_dtype(scale_dtype))
            yield name, array

    def settings(self, kept: list[str], plain_experts: list[str]) -> Mapping[str, Any] | None:
        """The quantization_config. kept: modules with a plain matrix. plain_experts: patterns of experts among them."""
        if self.packing is None:
            return None
        settings = dict(self.packing.settings)
        if self.packing.method != "compressed-tensors":
            return settings | {"modules_to_not_convert": kept}
        groups = {name: group | {"targets": [_EXPERTS]} for name, group in settings["config_groups"].items()}
        return settings | {"config_groups": groups, "ignore": plain_experts}


def _plain(matrix: Matrix) -> np.ndarray:
    return dequantize(matrix) if isinstance(matrix, QuantizedTensor) else matrix


def _same(one: Format, other: Format) -> bool:
    """True for formats that differ only in how scales are chosen."""
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("element", "group_rows", "group_columns", "has_e8m0_scales", "zero_points")
    )
