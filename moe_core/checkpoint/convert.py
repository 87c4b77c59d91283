"""Quantise the experts of a plain checkpoint, tensor by tensor, and report each layer's error.

    report = convert_checkpoint("Qwen3-30B-A3B", "Qwen3-30B-A3B-int4", format_named("int4_g128"))
    print(report)                                     # relative Frobenius error of every layer
    open_checkpoint("Qwen3-30B-A3B-int4").layer(0)    # QuantizedTensors

Everything but the routed experts is copied bit by bit. The stored layouts are published ones
(`moe_core.checkpoint.packing`): gpt-oss's own for mxfp4 of gpt_oss, DeepSeek's for fp8_block, compressed-tensors for
the others. Experts of fused storage are written one by one where the family has such names. Only this library reads
gpt_oss in other formats than mxfp4.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.checks import require_at_least, require_flag, require_kind
from moe_core.checkpoint.config import inside, read_json
from moe_core.checkpoint.layer import Checkpoint, open_checkpoint
from moe_core.checkpoint.packing import Packing, packing_for
from moe_core.checkpoint.resolve import module_of
from moe_core.checkpoint.storage import FLOATING, RawTensor, read_tensor
from moe_core.checkpoint.write import DEFAULT_SHARD_BYTES, Shards
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.quantize.reference import ErrorSum, dequantize, quantize
from moe_core.specs import named_fields

_SIDE_FILES = (".json", ".txt", ".jinja", ".model")
_OWN_FILES = ("config.json", "model.safetensors.index.json")
_FIELDS = ("gate_up", "down")


class ConversionProgress(NamedTuple):
    """tensors: the number of done ones, out of tensors_total."""

    tensor: str
    tensors: int
    tensors_total: int


class LayerError(NamedTuple):
    """Relative Frobenius errors of one layer over all experts."""

    layer: int
    gate_up: float
    down: float


@dataclass(frozen=True)
class ConversionReport:
    """bytes_before, bytes_after: of the experts' weights, with scales. not_finite: tensors that hold NaN or
    infinities."""

    format: Format
    layers: tuple[LayerError, ...]
    bytes_before: int
    bytes_after: int
    not_finite: tuple[str, ...] = ()

    def __str__(self) -> str:
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        smaller = self.bytes_before / max(self.bytes_after, 1)
        head = f"{self.format.name}: experts {before:.1f} MiB -> {after:.1f} MiB ({smaller:.2f} times smaller)"
        rows = [f"{'layer':>7}{'gate_up':>12}{'down':>12}   relative Frobenius error"]
        rows += [f"{error.layer:>7}{error.gate_up:>12.3e}{error.down:>12.3e}" for error in self.layers]
        rows += [f"NaN or infinity in {name}" for name in self.not_finite]
        return "\n".join([head, *rows])

    def as_dict(self) -> dict[str, Any]:
        """For JSON: NaN and infinite errors become None."""
        layers = [
            {name: value if math.isfinite(value) else None for name, value in error._asdict().items()}
            for error in self.layers
        ]
        sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {"format": self.format.name, **sizes, "layers": layers, "not_finite": list(self.not_finite)}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: Format,
    *,
    allow_not_finite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[ConversionProgress], object] | None = None,
) -> ConversionReport:
    """Write `source`, a plain checkpoint directory, to `destination` with its experts quantised in `format`.

    One tensor at a time (of fused storage: one expert's part) is in memory beyond the current shard. After an error no
    file is left. Tokenizers, templates and similar files are copied.

    Args:
        destination: a new or empty directory.
        allow_not_finite: allow NaN and infinities. The format decides their result.

    Raises:
        InvalidInput: the errors of `open_checkpoint`, a source that is quantised already or has links that lead out of
            it, a destination with content, sizes that the format's padding rule refuses, NaN or infinity.
        Unsupported: a format that no checkpoint stores weights in.
        OSError: the disk is full.
    """
    require_kind("format", format, Format)
    require_flag("allow_not_finite", allow_not_finite)
    require_at_least("shard_bytes", shard_bytes, 1)
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is not None:
        raise InvalidInput(
            f"source must be a plain checkpoint, got {checkpoint.path} in "
            f"{checkpoint.packing or checkpoint.quantization.method}; convert the original"
        )
    packing = packing_for(format, checkpoint.family == "gpt_oss")
    conversion = _Conversion(checkpoint, packing, allow_not_finite, progress)
    named = [path for path in checkpoint.path.iterdir() if path.suffix in _SIDE_FILES and path.name not in _OWN_FILES]
    # A link that leads out of the checkpoint is refused: its target would be published.
    side_files = [path for path in named if inside(checkpoint.path, path.name).is_file()]
    with Shards("destination", destination, shard_bytes) as shards:
        shards.extend(conversion.tensors())
        shards.finish(conversion.settings(), side_files)
    return conversion.report()


class _Conversion:
    def __init__(
        self,
        checkpoint: Checkpoint,
        packing: Packing,
        allow_not_finite: bool,
        progress: Callable[[ConversionProgress], object] | None,
    ) -> None:
        self._checkpoint, self._packing, self._progress = checkpoint, packing, progress
        self._allow_not_finite = allow_not_finite
        self._not_finite: dict[str, None] = {}
        self._errors = {(layer, field): ErrorSum() for layer in checkpoint.moe_layers for field in _FIELDS}
        #: (layer, field) of tensors with weights of experts.
        self._weights: dict[str, tuple[int, str]] = {}
        #: Tensors of all experts as `[E, D, N]`.
        self._turned: set[str] = set()
        in_out = checkpoint.architecture.spec.weight_layout == "in_out"
        self._kept: list[str] = []
        self._before = self._after = 0
        for layer in checkpoint.moe_layers:
            stacks = checkpoint.stacks(layer)
            for field in _FIELDS:
                parts = stacks[f"experts.{field}"].parts
                strange = [part.tensor for part in parts if part.decode is not None and not part.is_turned]
                if strange:
                    raise Unsupported(
                        f"{strange[0]} holds experts in an order of its own (rows of gate and up in turn, or all "
                        "experts in one matrix), which cannot be quantised; quantise layers instead of the files"
                    )
                self._weights |= {part.tensor: (layer, field) for part in parts}
                self._turned |= {part.tensor for part in parts if len(part.shape) == 3 and part.is_turned != in_out}

        sizes = checkpoint.architecture
        shapes = {"gate_up": (sizes.d_ff, sizes.expert_width), "down": (sizes.expert_width, sizes.d_ff)}
        for name, (_, field) in self._weights.items():
            try:
                quantized_shapes(QuantizedSpec(packing.format), shapes[field])
            except InvalidInput as problem:
                raise InvalidInput(f"{name} cannot be quantised: {problem}") from problem

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        index = self._checkpoint.index
        missing = [name for name in self._weights if name not in index.files]
        if missing:
            index.path_of(missing[0])
        for done, (name, opened) in enumerate(index.opened(index.files), start=1):
            if name in self._weights:
                yield from self._quantized(name, RawTensor(opened, name))
            else:
                array = read_tensor(opened, name)
                self._note_finite(name, array)
                if array.ndim == 2 and name.endswith(".weight"):
                    self._kept.append(name.removesuffix(".weight"))
                yield name, array
            if self._progress is not None:
                self._progress(ConversionProgress(name, done, len(index.files)))

    def _note_finite(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind not in "fcV" or bool(np.isfinite(array).all()):
            return
        if not self._allow_not_finite:
            raise InvalidInput(
                f"{name} must hold finite numbers, got {int((~np.isfinite(array)).sum())} that are NaN or infinite in "
                f"{list(array.shape)}; repair the checkpoint, or allow them (allow_not_finite, --allow-not-finite)"
            )
        self._not_finite[name] = None

    def _quantized(self, name: str, tensor: RawTensor) -> Iterator[tuple[str, np.ndarray]]:
        if tensor.get_dtype() not in FLOATING:
            raise Unsupported(f"{name} must be bfloat16, float16 or float32, got {tensor.get_dtype()}; cast it first")
        weight, per_expert = self._weights[name], self._checkpoint.architecture.naming.per_expert
        module, fused = module_of(name)
        if len(tensor.get_shape()) == 2:
            yield from self._packing.tensors(module, self._matrix(name, tensor[:]), fused=False)
            return
        matrices = (tensor[expert : expert + 1][0] for expert in range(tensor.get_shape()[0]))
        if per_expert is None:
            turn = name in self._turned
            quantized = [self._matrix(name, matrix.T if turn else matrix) for matrix in matrices]
            arrays = zip(*(dict(named_fields(matrix)).values() for matrix in quantized), strict=True)
            stacked = QuantizedTensor(quantized[0].spec, *map(np.stack, arrays))
            yield from self._packing.tensors(module, stacked, fused=fused)
            return
        experts = module.rpartition(".")[0]
        names = per_expert[-1:] if weight[1] == "down" else per_expert[:-1]
        for expert, matrix in enumerate(matrices):
            for part, rows in zip(names, np.split(matrix, len(names)), strict=True):
                yield from self._packing.tensors(f"{experts}.{expert}.{part}", self._matrix(name, rows), fused=False)

    def _matrix(self, name: str, matrix: np.ndarray) -> QuantizedTensor:
        self._note_finite(name, matrix)
        quantized = quantize(matrix, self._packing.format)
        self._errors[self._weights[name]].add(matrix, dequantize(quantized))
        self._before += matrix.nbytes
        self._after += quantized.nbytes
        return quantized

    def settings(self) -> dict[str, Any]:
        """Call it after every tensor has been made."""
        settings = read_json(self._checkpoint.path / "config.json")
        ignored = "ignore" if self._packing.method == "compressed-tensors" else "modules_to_not_convert"
        return settings | {"quantization_config": {**self._packing.settings, ignored: self._kept}}

    def report(self) -> ConversionReport:
        layers = tuple(
            LayerError(layer, *(self._errors[layer, field].relative_frobenius for field in _FIELDS))
            for layer in self._checkpoint.moe_layers
        )
        return ConversionReport(self._packing.format, layers, self._before, self._after, tuple(self._not_finite))
