"""The tensors of GGUF files outside of the experts, under their family's names, and in its order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from moe_core.checkpoint.convert.stream import HEADERS, Made, TensorPlan, Unit
from moe_core.checkpoint.gguf import PLAIN, numbers_of, shape_of, tensor_names, with_transformers
from moe_core.checkpoint.layer import Checkpoint
from moe_core.checkpoint.stacks import LayerNames, gguf_names
from moe_core.checkpoint.storage import StackReader
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.common.rounding import round_to, to_float32

#: Families -> llama.cpp's architecture. Its converter of others changes tensors in ways that nothing here undoes.
ARCHITECTURES = {
    "mixtral": "llama", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2", "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "phimoe": "phimoe", "lfm2_moe": "lfm2moe",
    "ernie4_5_moe": "ernie4_5-moe", "hunyuan_v1_moe": "hunyuan-moe",
}  # fmt: skip
#: Architectures with the rows of q and k in the order of ggml's rotary embedding, which turns neighbours.
_ROTARY = ("llama", "granitemoe")
#: Tensors that follow from config.json.
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PIECE_ELEMENTS = 2**18
#: Bytes of memory to make a number: as stored, decoded with its temporary arrays, and as written.
_WORK = 32


def llama_architecture(checkpoint: Checkpoint, reader: StackReader) -> str:
    """A file's architecture. Raises Unsupported if its conversion cannot be undone, InvalidInput if it is another."""
    family = checkpoint.family
    if family not in ARCHITECTURES or checkpoint.nested:
        kind = "a multimodal model" if checkpoint.nested else f"{family!r}"
        raise Unsupported(
            f"model_type must be one of {', '.join(ARCHITECTURES)} to convert GGUF, got {kind}, where llama.cpp "
            "changes tensors in ways that cannot be undone here; convert the original checkpoint"
        )
    first = next(iter(checkpoint.index.files))
    stored = reader.file_of(first).metadata().get("general.architecture")
    if stored != ARCHITECTURES[family]:
        raise InvalidInput(
            f"general.architecture in {checkpoint.index.files[first]} must be {ARCHITECTURES[family]!r} for {family}, "
            f"got {stored!r}; use the config.json that belongs to the file"
        )
    return str(stored)


class _Weight(NamedTuple):
    """A published tensor. sources: in GGUF. rows: any multiple of them can be made alone, by `make`."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    rows: int
    make: Callable[[list[np.ndarray]], np.ndarray]


class GgufModules:
    """Tensors outside of the experts. architecture: see `llama_architecture`. names: of the layers, as published.
    held: the experts' tensors. counted: looks at numbers; what it returns notes them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: StackReader,
        architecture: str,
        names: list[LayerNames],
        held: set[str],
        counted: Callable[[str, np.ndarray], Callable[[], None]],
    ) -> None:
        self._checkpoint, self._reader, self._counted = checkpoint, reader, counted
        self._is_rotary = architecture in _ROTARY
        self._map = tensor_names(architecture, checkpoint.num_layers)
        #: Published names that the package's table has not.
        self._special: dict[str, tuple[str, ...]] = {}
        for layer, one in zip(checkpoint.moe_layers, names, strict=True):
            stored = gguf_names(checkpoint.architecture, layer, checkpoint.index)
            self._special[one.correction_bias] = (stored.correction_bias,)
            if len(one.shared) < len(stored.shared):
                self._special[one.shared[0]] = stored.shared[:-1]
        self._float32 = {one.correction_bias for one in names}
        weights = [self._weight(*one) for one in self._published(names).items()]
        self._weights = {weight.sources[0]: weight for weight in weights}
        self.companions = {source for weight in weights for source in weight.sources[1:]}
        left = checkpoint.index.files.keys() - held - self.companions - self._weights.keys()
        later = tuple(f"blk.{layer}." for layer in range(checkpoint.num_layers, checkpoint.num_layers + 8))
        dropped = {name for name in left if name.startswith(later)}
        if dropped:
            warnings.warn(
                f"{checkpoint.path}: {len(dropped)} tensors of multi-token prediction such as {min(dropped)} are left "
                "out: transformers has no model that takes them",
                stacklevel=4,
            )
        unknown = left - dropped - set(_DERIVED)
        if unknown:
            name = min(unknown)
            raise Unsupported(
                f"{name} in {checkpoint.index.files[name]} must be a tensor of {checkpoint.family}, got one that its "
                "published checkpoints have not; use the config.json that belongs to the file, or pass the file's path "
                "if its directory holds others"
            )
        self.companions |= dropped | set(_DERIVED)

    def _published(self, names: list[LayerNames]) -> dict[str, tuple[int, ...]]:
        path = self._checkpoint.path
        experts = tuple(end for one in names for end in (f"{one.block}experts.", *(one.fused or ())))
        listed = with_transformers(path).published_tensors(self._checkpoint.document)
        return {name: shape for name, shape in listed.items() if not name.startswith(experts)}

    def _weight(self, name: str, shape: tuple[int, ...]) -> _Weight:
        sources: tuple[str, ...] = self._special.get(name, ()) or (self._mapped(name),)
        first, rows, make = sources[0], 1, _first
        if "attn_kv_b" in first and first not in self._checkpoint.index.files:
            sources, make = tuple(first.replace("attn_kv_b", f"attn_{half}_b") for half in "kv"), _kv_b
            heads = self._shape(sources[0])[0]
            rows = shape[0] // heads
        elif len(sources) > 1:
            rows, make = shape[0], np.concatenate
        elif self._is_rotary and (heads := self._heads(first)):
            rows = shape[0] // heads
            make = partial(_halves_apart, rows=rows)
        shapes = [self._shape(source) for source in sources]
        flat = [tuple(size for size in one if size > 1) for one in (*shapes, shape)]
        if make is _first and shapes[0][0] != shape[0]:
            rows = shape[0]
        fits = flat[0] == flat[-1] if len(sources) == 1 else sum(map(math.prod, shapes)) == math.prod(shape)
        if not fits:
            raise InvalidInput(
                f"{' and '.join(sources)} must be {list(shape)} by config.json, got "
                f"{' and '.join(str(list(one)) for one in shapes)}; use the config.json that belongs to the file"
            )
        return _Weight(name, shape, sources, rows, make)

    def _mapped(self, name: str) -> str:
        mapped = self._map.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        # A parameter of a published name without either ending, such as attention sinks, has `.weight` in GGUF.
        return mapped if mapped.endswith((".weight", ".bias")) else f"{mapped or name}.weight"

    def _shape(self, source: str) -> tuple[int, ...]:
        return shape_of(self._reader.file_of(source).entry(source))

    def _heads(self, source: str) -> int:
        """The heads of q or k, 0 for other tensors."""
        settings, module = self._checkpoint.document, source.split(".")[-2]
        heads = settings.get("num_attention_heads", 0)
        return {"attn_q": heads, "attn_k": settings.get("num_key_value_heads") or heads}.get(module, 0)

    def unit(self, name: str, dtype: str) -> Unit | None:
        """The published tensor in place of its first source, the tensor `name`."""
        weight = self._weights.get(name)
        if weight is None:
            return None
        dtype = "float32" if weight.name in self._float32 else dtype
        size, columns = weight.shape[0], math.prod(weight.shape[1:])
        step = weight.rows * max(1, _PIECE_ELEMENTS // (weight.rows * max(1, columns)))

        def made(first: int) -> Made:
            rows = slice(first, min(first + step, size))
            arrays = [self._numbers(source, rows, size) for source in weight.sources]
            result = weight.make(arrays)
            return Made([round_to(result, dtype)], [self._counted(weight.name, result)])

        plan = TensorPlan(weight.name, HEADERS[dtype], weight.shape)
        return Unit((plan,), lambda: [partial(made, first) for first in range(0, size, step)], _WORK * step * columns)

    def _numbers(self, source: str, rows: slice, size: int) -> np.ndarray:
        """The share of a source that rows of the published tensor, out of `size`, need."""
        tensor = self._reader.tensor(source)
        count = tensor.get_shape()[0]
        stored = tensor[rows.start * count // size : rows.stop * count // size]
        return to_float32(stored) if tensor.get_dtype() in PLAIN else numbers_of(stored, tensor.get_dtype())

    def plain_modules(self) -> list[str]:
        """Modules with a plain matrix in the destination."""
        weights = self._weights.values()
        return [
            one.name.removesuffix(".weight") for one in weights if one.name.endswith(".weight") and len(one.shape) == 2
        ]


def _first(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0]


def _halves_apart(arrays: list[np.ndarray], rows: int) -> np.ndarray:
    """Rows of heads, each with the halves of its rotary pairs apart instead of in turn."""
    array = arrays[0]
    return array.reshape(-1, rows // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _kv_b(arrays: list[np.ndarray]) -> np.ndarray:
    """kv_b_proj of heads from k_b `[H, rank, nope]` and v_b `[H, v, rank]`, which attention on latents takes."""
    keys, values = arrays
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])
