"""Translate a checkpoint: its routed experts to any format that checkpoints store, or to plain weights.

Quantised experts are written one by one, in the family's published names or else in llm-compressor's; mxfp4 of gpt_oss
is written as published. Plain tensors outside of the experts are copied bit by bit, quantised ones are dequantised.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import moe_core
from moe_core.base import dtypes
from moe_core.base.checks import require_at_least, require_flag, require_kind
from moe_core.checkpoint.config import inside
from moe_core.checkpoint.convert.gguf import GgufModules, llama_architecture
from moe_core.checkpoint.convert.nvfp4 import Nvfp4
from moe_core.checkpoint.convert.source import DenseModules, LayerSource, Matrix, cast, count_not_finite, pieces
from moe_core.checkpoint.convert.stream import BITS, HEADERS, Made, Stream, TensorPlan, Unit, in_shards
from moe_core.checkpoint.convert.target import LOADERS as LOADERS
from moe_core.checkpoint.convert.target import Target
from moe_core.checkpoint.convert.whole import whole_units
from moe_core.checkpoint.layer import NO_SHARED_EXPERT, Checkpoint, open_checkpoint
from moe_core.checkpoint.layouts import NVFP4
from moe_core.checkpoint.storage import FLOATING, StackReader
from moe_core.checkpoint.write import DEFAULT_SHARD_BYTES
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedTensor, format_named, format_names
from moe_core.ops.quantize.reference import ErrorSum, dequantize

_SIDE_FILES = (".json", ".txt", ".jinja", ".model")
_OWN_FILES = ("config.json", "model.safetensors.index.json")
_FIELDS = ("gate_up", "down")
_BIAS = ("_bias", ".bias")


class ConversionProgress(NamedTuple):
    """tensor: the last written one. tensors: the number of written ones, out of tensors_total."""

    tensor: str
    tensors: int
    tensors_total: int


class LayerError(NamedTuple):
    """Relative Frobenius errors of one layer over all experts. 0: nothing was lost."""

    layer: int
    gate_up: float
    down: float


@dataclass(frozen=True)
class ConversionReport:
    """format: a name for plain weights and nvfp4. bytes_before, bytes_after: of the experts' weights in the files, with
    scales. not_finite: tensors that hold NaN or infinities."""

    format: Format | str
    layers: tuple[LayerError, ...]
    bytes_before: int
    bytes_after: int
    not_finite: tuple[str, ...] = ()

    def __str__(self) -> str:
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        smaller = self.bytes_before / max(self.bytes_after, 1)
        head = f"{self.format}: experts {before:.1f} MiB -> {after:.1f} MiB ({smaller:.2f} times smaller)"
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
        return {"format": str(self.format), **sizes, "layers": layers, "not_finite": list(self.not_finite)}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: Format | str,
    *,
    loader: str = "transformers",
    allow_not_finite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[ConversionProgress], object] | None = None,
) -> ConversionReport:
    """Write the checkpoint directory `source` to `destination` with its experts in `format`.

    Tensors stream to the disk. A thread for each core makes an expert's matrices at a time, fewer if they would take
    more memory than a shard. Wrong input leaves no file. After any other interruption, the same call goes on with the
    next shard. Tokenizers, templates and similar files are copied.

    Args:
        source: a directory, or a GGUF file, whose directory may have the config.json of the original model.
        destination: a new or empty directory, or one that an interrupted call left.
        format: a format or its name. A dtype (`bfloat16`, `float16` or `float32`) writes plain weights, `nvfp4` that
            format, which no kernel of this library takes.
        loader: `transformers`: refuse what transformers does not load right. `moebius`: only this library must read
            the files, which have llm-compressor's names.
        allow_not_finite: allow NaN and infinities. The format decides their result.

    Raises:
        InvalidInput: the errors of `open_checkpoint`, a source with links that lead out of it, a destination with other
            content, sizes that the format's padding rule refuses, NaN or infinity.
        Unsupported: a format that no checkpoint stores weights in, or that `loader` does not read.
        OSError: the disk is full.
    """
    if isinstance(format, str) and format in format_names():
        format = format_named(format)
    elif not isinstance(format, str):
        require_kind("format", format, Format)
    require_flag("allow_not_finite", allow_not_finite)
    require_at_least("shard_bytes", shard_bytes, 1)
    checkpoint = open_checkpoint(source)
    if checkpoint.architecture.lacks_shared:
        warnings.warn(f"{checkpoint.path}: {NO_SHARED_EXPERT}", stacklevel=2)
    with StackReader(checkpoint.index) as reader:
        conversion = _Conversion(checkpoint, reader, format, loader, allow_not_finite)
        beside = () if checkpoint.only else checkpoint.path.iterdir()
        named = [path for path in beside if path.suffix in _SIDE_FILES]
        # A link that leads out of the checkpoint is refused: its target would be published.
        side = [path for path in named if path.name not in _OWN_FILES and inside(checkpoint.path, path.name).is_file()]
        shards = in_shards(conversion.units(), shard_bytes)
        total, written = sum(len(unit.tensors) for units in shards for unit in units), 0

        def done(unit: Unit) -> None:
            nonlocal written
            written += len(unit.tensors)
            if progress is not None:
                progress(ConversionProgress(unit.tensors[-1].name, written, total))

        with Stream(destination, _identity(checkpoint, str(format), loader, allow_not_finite, shard_bytes)) as stream:
            if stream.state is not None:
                conversion.restore(stream.state)
            stream.write(shards, conversion.state, done)
            stream.finish(conversion.settings(), side)
        return conversion.report()


def _identity(checkpoint: Checkpoint, *options: object) -> str:
    """Of a source's files and a conversion's options."""
    files = []
    for name in sorted(set(checkpoint.index.files.values())):
        status = inside(checkpoint.path, name).stat()
        files.append((name, status.st_size, status.st_mtime_ns))
    facts = [moe_core.__version__, files, checkpoint.document, options]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class _Conversion:
    def __init__(
        self, checkpoint: Checkpoint, reader: StackReader, format: Format | str, loader: str, allow_not_finite: bool
    ) -> None:
        self._checkpoint, self._reader, self._format = checkpoint, reader, format
        self._allow_not_finite, self._not_finite = allow_not_finite, dict[str, None]()
        if not checkpoint.moe_layers:
            raise InvalidInput(f"source must have layers with experts, got {checkpoint.path} without; copy it instead")
        architecture = llama_architecture(checkpoint, reader) if checkpoint.index.is_gguf else ""
        self._layers = [LayerSource(checkpoint, reader, layer) for layer in checkpoint.moe_layers]
        self._plain = next((layer.dtype for layer in self._layers if layer.dtype), None) or self._plain_dtype()
        self._float32 = {layer.names.correction_bias for layer in self._layers}
        self._target = Target.of(checkpoint, format, self._plain, loader)
        self._target.require_sizes(self._layers[0].names.shared)
        self._errors = {(layer, field): ErrorSum() for layer in checkpoint.moe_layers for field in _FIELDS}
        held = {name for layer in self._layers for name in layer.tensors}
        names = [layer.names for layer in self._layers]
        self._dense = (
            GgufModules(checkpoint, reader, architecture, names, held, self._counted)
            if architecture
            else DenseModules(checkpoint, reader, names[0], held)
        )
        self._after = 0
        self._planned: dict[Any, list[TensorPlan]] = {}

    def _plain_dtype(self) -> str:
        """Of what becomes plain: the config's, or bfloat16."""
        named = self._checkpoint.config.get("dtype") or self._checkpoint.config.get("torch_dtype") or "bfloat16"
        return dtypes.canonical(named)

    # The plan

    def units(self) -> Iterator[Unit]:
        index, dense = self._checkpoint.index, self._dense
        by_tensor = {name: layer for layer in self._layers for name in layer.tensors}
        missing = [name for name in by_tensor if name not in index.files]
        if missing:
            index.path_of(missing[0])
        started: set[int] = set()
        for name in sorted(index.files, key=index.files.__getitem__):
            layer = by_tensor.get(name)
            if layer is None:
                unit = dense.unit(name, self._target.dtype) or self._copied(name)
                if unit is not None:
                    yield unit
            elif layer.layer not in started:
                started.add(layer.layer)
                for unit in self._experts(layer):
                    self._after += sum(one.nbytes for one in unit.tensors if not one.name.endswith(_BIAS))
                    yield unit

    def _copied(self, name: str) -> Unit | None:
        if name in self._dense.companions:
            return None
        file = self._reader.file_of(name)
        entry = file.entry(name)
        if entry.dtype not in BITS:
            raise InvalidInput(f"{name} must have a dtype of safetensors' list, got {entry.dtype}; cast it first")
        # Plain files have one dtype, but for what is fp32 among others.
        is_cast = self._target.packing is None and FLOATING.get(entry.dtype) == self._plain
        wanted = self._target.dtype if is_cast and name not in self._float32 else None
        plan = TensorPlan(name, entry.dtype if wanted is None else HEADERS[wanted], entry.shape)

        def made(piece: np.ndarray) -> Made:
            part = (
                "" if piece.nbytes == math.prod(entry.shape) * BITS[entry.dtype] // 8 else f"{piece.size} numbers of "
            )
            counted = self._counted(name, piece, f"{part}{list(entry.shape)}")
            return Made([piece if wanted is None else cast(piece, wanted)], [counted])

        return pieces(file, name, plan, made)

    def _experts(self, layer: LayerSource) -> Iterator[Unit]:
        target = self._target
        if target.packing is None or target.interleaved:
            yield from whole_units(target, layer, self._counted, self._compared)
            return
        for expert in range(self._checkpoint.architecture.num_experts):
            for fields in target.together:
                yield self._matrices(layer, expert, fields)
            for field, bias in layer.biases(None).items():
                name = f"{layer.block}experts.{expert}.{target.modules[field]}.bias"
                yield self._bias_unit(layer, expert, field, TensorPlan.like(name, bias))

    def _matrices(self, layer: LayerSource, expert: int, fields: tuple[str, ...]) -> Unit:
        target = self._target
        modules = {field: f"{layer.block}experts.{expert}.{target.modules[field]}" for field in fields}

        def planned(field: str) -> list[TensorPlan]:
            key = (target.shapes()[field], layer.storage(field))
            if key not in self._planned:
                zeros = target.tensors("", target.zeros(*key), key[1])
                self._planned[key] = [TensorPlan.like(name, array) for name, array in zeros]
            return self._planned[key]

        def make() -> Made:
            matrices, arrays = layer.matrices(expert, fields), []
            settle = [self._counted(f"{module}.weight", matrices[field]) for field, module in modules.items()]
            kept = layer.nvfp4(expert, fields) if target.format == NVFP4 else None
            for field, made in target.converted(matrices, kept).items():
                numbers = made.numbers if isinstance(made, Nvfp4) else made
                settle.append(self._compared(layer.layer, field, matrices[field], numbers))
                arrays += [array for _, array in target.tensors(modules[field], made, layer.storage(field))]
            return Made(arrays, settle)

        plans = [plan._replace(name=module + plan.name) for field, module in modules.items() for plan in planned(field)]
        work = layer.work * sum(math.prod(target.shapes()[field]) for field in fields)
        return Unit(tuple(plans), lambda: [make], work)

    def _bias_unit(self, layer: LayerSource, expert: int, field: str, plan: TensorPlan) -> Unit:
        def read() -> Made:
            bias = layer.biases(expert)[field]
            return Made([bias], [self._counted(plan.name, bias)])

        return Unit((plan,), lambda: [read], layer.work * plan.nbytes)

    def _counted(self, name: str, matrix: Matrix, where: str = "") -> Callable[[], None]:
        """Look for NaN and infinities. The result notes them."""
        array = matrix.scales if isinstance(matrix, QuantizedTensor) else matrix
        count = count_not_finite(array)
        if count and not self._allow_not_finite:
            raise InvalidInput(
                f"{name} must hold finite numbers, got {count} that are NaN or infinite in "
                f"{where or list(array.shape)}; repair the checkpoint, or allow them (allow_not_finite, "
                "--allow-not-finite)"
            )
        return lambda: self._not_finite.update({name: None} if count else {})

    def _compared(self, layer: int, field: str, matrix: Matrix, result: Matrix) -> Callable[[], None]:
        """Compute the error of a converted matrix. The result notes it."""
        before = dequantize(matrix) if isinstance(matrix, QuantizedTensor) else matrix
        error, total = ErrorSum(), self._errors[layer, "down" if field == "down" else "gate_up"]
        error.add(before, before if result is matrix else result)

        def note() -> None:
            total.sums = total.sums[0] + error.sums[0], total.sums[1] + error.sums[1]

        return note

    # What a finished shard leaves

    def state(self) -> Any:
        return [[error.sums for error in self._errors.values()], list(self._not_finite)]

    def restore(self, state: Any) -> None:
        errors, names = state
        self._not_finite = dict.fromkeys(names)
        for error, sums in zip(self._errors.values(), errors, strict=True):
            error.sums = tuple(sums)

    def settings(self) -> dict[str, Any]:
        """config.json."""
        nested = settings = copy.deepcopy(dict(self._checkpoint.document))
        for key in ("", *self._checkpoint.nested):
            nested = nested[key] if key else nested
            nested.pop("quantization_config", None)
        kept = self._dense.plain_modules()
        experts = [re.sub(r"[.]\d+[.][^.]+$", "", name) for name in kept if re.search(r"[.]experts[.]\d+[.]", name)]
        patterns = [f"re:{re.escape(name)}[.].*" for name in dict.fromkeys(experts)]
        quantization = self._target.settings(kept, patterns)
        dtype = {"torch_dtype" if "torch_dtype" in settings else "dtype": self._target.dtype}
        if quantization is None:
            return settings | dtype
        # Metadata of GGUF names none.
        return settings | {"quantization_config": quantization} | (dtype if settings.get("dtype", "") is None else {})

    def report(self) -> ConversionReport:
        layers = tuple(
            LayerError(layer, *(self._errors[layer, field].relative_frobenius for field in _FIELDS))
            for layer in self._checkpoint.moe_layers
        )
        stored = [name for layer in self._layers for name in layer.tensors if not name.endswith(_BIAS)]
        entries = [self._reader.file_of(name).entry(name) for name in stored]
        before = sum(math.prod(entry.shape) * BITS.get(entry.dtype, 8) // 8 for entry in entries)
        return ConversionReport(self._format, layers, before, self._after, tuple(self._not_finite))
