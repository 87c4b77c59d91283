"""Examine a checkpoint: how each matrix is stored, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import html
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.checkpoint.config import read_config
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.checkpoint.layer import Checkpoint, open_checkpoint
from moe_core.checkpoint.packing import Packing
from moe_core.checkpoint.quantized import Layout
from moe_core.checkpoint.resolve import bad_scales, module_of
from moe_core.checkpoint.storage import Part, StackReader
from moe_core.errors import InvalidInput, Unsupported
from moe_core.tools.doctor.loaders import Facts, misreadings, replaced

_EXPERTS = ("experts.gate_up", "experts.down")
#: Parts of names of settings that describe experts or routers, and settings that change no inference.
_MOE_WORDS = ("expert", "moe", "router", "routed", "topk", "top_k", "n_group", "swiglu", "jitter", "scoring")
_HARMLESS = """router_aux_loss_coef output_router_logits aux_loss_alpha router_z_loss_coef seq_aux ep_size
    moe_router_aux_loss_coef expert_dtype num_experts_per_tok_train moe_dropout router_dtype top_k_sampling"""
_SAMPLE_ROWS, _MOST_LISTED = 4, 8


@dataclass(frozen=True)
class Row:
    """The matrices of one field of one layer that are stored alike. shape: in the file. wanted: by config.json."""

    layer: int
    field: str
    count: int
    stored: str
    scales: str
    shape: tuple[int, ...]
    wanted: tuple[int, ...]
    example: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointReport:
    path: str
    family: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    unhonoured: tuple[str, ...]
    loaders: tuple[tuple[str, str, tuple[int, ...]], ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return not self.problems and not any(row.problems for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        loaders = [{"loader": name, "effect": effect, "layers": list(layers)} for name, effect, layers in self.loaders]
        facts = {"path": self.path, "family": self.family, "healthy": self.healthy, "matrices": rows}
        lists = {"problems": self.problems, "unhonoured": self.unhonoured, "notes": self.notes}
        return facts | {name: list(values) for name, values in lists.items()} | {"loaders": loaders}

    def _sections(self) -> Iterator[tuple[str, list[str]]]:
        found = [f"layer {row.layer} {row.field}: {problem}" for row in self.rows for problem in row.problems]
        yield "Problems", [*self.problems, *found]
        yield "Settings about experts that nobody honours", list(self.unhonoured)
        yield "How it is read here", list(self.notes)
        yield "Other loaders", [f"{name} {effect} ({_numbers(layers)})" for name, effect, layers in self.loaders]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.family}", "", _line(_HEAD)]
        lines += [_line(cells) for cells in self._cells()]
        for title, entries in self._sections():
            lines += ["", title, *(f"  - {entry}" for entry in entries or ["none"])]
        return "\n".join(lines)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """One row for layers that are stored alike."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for row in self.rows:
            sizes = "x".join(map(str, row.shape)), "x".join(map(str, row.wanted))
            facts = (row.field, str(row.count), row.stored, row.scales, *sizes, str(len(row.problems)))
            alike.setdefault(facts, []).append(row.layer)
        for facts, layers in alike.items():
            yield _numbers(tuple(layers)), *facts

    def html(self) -> str:
        """A page without scripts or other files."""

        def cells(values: tuple[str, ...], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(value)}</{tag}>' for value in values)}</tr>"

        body = [cells(_HEAD, "th"), *(cells(row, "td") for row in self._cells())]
        parts = [
            f"<h1>{html.escape(self.path)}</h1><p>{html.escape(self.family)}</p>",
            f"<table>{''.join(body)}</table>",
        ]
        for title, entries in self._sections():
            listed = "".join(f"<li>{html.escape(entry)}</li>" for entry in entries or ["none"])
            parts.append(f"<h2>{title}</h2><ul>{listed}</ul>")
        style = (
            "body{font-family:sans-serif}table{border-collapse:collapse}td,th{border:1px solid #999;padding:4px 8px}"
        )
        head = f'<meta charset="utf-8"><title>{html.escape(self.path)}</title><style>{style}</style>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


_HEAD = ("layers", "matrix", "count", "stored as", "scales", "in the file", "by config", "problems")
_WIDTHS = (10, 16, 7, 28, 26, 16, 14, 8)


def _line(cells: tuple[str, ...]) -> str:
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _numbers(layers: tuple[int, ...]) -> str:
    """`0-3, 5`."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def examine(path: str, progress: Callable[[str], object] = lambda line: None) -> CheckpointReport:
    """Examine every MoE layer from headers, scales and a few rows of each expert. Errors: `open_checkpoint`'s."""
    checkpoint = open_checkpoint(path)
    rows: list[Row] = []
    problems: list[str] = []
    notes: dict[str, None] = {}
    layouts: dict[int, Layout] = {}
    for layer in checkpoint.moe_layers:
        progress(f"layer {layer} of {checkpoint.num_layers}")
        try:
            layouts[layer] = layout = checkpoint.layout(layer)
            with StackReader(checkpoint.index) as reader:
                reader.check(layout.stacks)
                rows += _Examination(checkpoint, layer, layout, reader).rows()
        except (InvalidInput, Unsupported) as error:
            problems.append(f"layer {layer}: {error}{_nearest(checkpoint, str(error))}")
        else:
            notes |= dict.fromkeys(layout.notes)
    loaders: dict[tuple[str, str], list[int]] = {}
    for layer in layouts:
        for found in misreadings(_facts(checkpoint, layer, layouts, rows)):
            loaders.setdefault(found, []).append(layer)
    listed = tuple((name, effect, tuple(layers)) for (name, effect), layers in loaders.items())
    return CheckpointReport(
        str(checkpoint.path),
        checkpoint.family,
        tuple(rows),
        tuple(problems),
        _unhonoured(checkpoint),
        listed,
        tuple(notes),
    )


def _nearest(checkpoint: Checkpoint, message: str) -> str:
    """Names in the files that nearly match one that is missing."""
    _, found, rest = message.partition("must hold the tensor ")
    name = rest.partition(",")[0]
    if not found:
        return ""
    same = [other for other in checkpoint.index.files if other.count(".") == name.count(".") or other.endswith(name)]
    near = difflib.get_close_matches(name, same[:20_000], 3, 0.8)
    return f" (names that nearly match: {', '.join(near)})" if near else ""


class _Recorder(dict[str, Any]):
    """Settings that remember which of them were asked for."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _unhonoured(checkpoint: Checkpoint) -> tuple[str, ...]:
    model = text_model(read_config(checkpoint.path))
    settings = _Recorder(model.settings)
    architecture_of(dataclasses.replace(model, settings=settings))
    harmless, asked = _HARMLESS.split(), sorted(settings.asked)
    left = [
        key
        for key, value in model.settings.items()
        if key not in settings.asked and key not in harmless and value not in (None, False)
        if any(word in key.lower() for word in _MOE_WORDS)
    ]
    near = {key: difflib.get_close_matches(key, asked, 1, 0.85) for key in left}
    return tuple(
        f"{key} = {model.settings[key]!r:.80}" + (f" (like {near[key][0]})" if near[key] else "") for key in left
    )


def _facts(checkpoint: Checkpoint, layer: int, layouts: Mapping[int, Layout], rows: list[Row]) -> Facts:
    pairs = [pair for name in _EXPERTS for pair in layouts[layer].matrices[name]]
    packings = {str(packing): packing for _, packing in pairs if packing is not None}
    plain = {number for number, one in layouts.items() if not any(p for n in _EXPERTS for _, p in one.matrices[n])}
    quantization, one_by_one = checkpoint.quantization, ".experts.0." in pairs[0][0].tensor
    settings = {} if quantization is None else quantization.settings
    by_expert: dict[str, set[str]] = {}
    for part, packing in pairs:
        by_expert.setdefault(part.tensor.rpartition(".experts.")[2].split(".")[0], set()).add(str(packing))
    fused_only = checkpoint.architecture.naming.per_expert is None and not replaced(checkpoint.family)
    return Facts(
        "" if quantization is None else quantization.method,
        checkpoint.family,
        frozenset(str(packing or "plain") for _, packing in pairs),
        str(settings.get("format", "")),
        checkpoint.architecture.d_ff,
        all(len(kinds) == 1 for kinds in by_expert.values()),
        one_by_one,
        fused_only,
        0 < len(plain) < len(layouts),
        any(packing.static for packing in packings.values()),
        any(part.field == "zero_points" for packing in packings.values() for part in packing.components),
        any("gate and up have scales that differ" in row.scales for row in rows if row.layer == layer),
        all(packing.scheme is None or packing.scheme.activations is None for packing in packings.values()),
        checkpoint.architecture.lacks_shared,
    )


class _Examination:
    """The matrices of one layer."""

    def __init__(self, checkpoint: Checkpoint, layer: int, layout: Layout, reader: StackReader) -> None:
        self._index, self._layer, self._layout, self._reader = checkpoint.index, layer, layout, reader

    def rows(self) -> Iterator[Row]:
        for name, pairs in self._layout.matrices.items():
            alike: dict[str, list[tuple[Part, Packing | None]]] = {}
            for part, packing in pairs:
                stored = str(packing) if packing else f"plain {self._reader.stored_dtype(part.tensor)}"
                alike.setdefault(stored, []).append((part, packing))
            same = self._same_experts(pairs) if name in _EXPERTS else []
            for stored, some in alike.items():
                part, packing = some[0]
                first = part.tensor if packing is None else self._tensor(part, packing, 0)
                problems = [*self._bad_scales(some), *same]
                same = []
                shape = self._reader.stored_shape(first)
                scales = self._scales(some)
                yield Row(self._layer, name, len(some), stored, scales, shape, part.shape, first, tuple(problems))

    def _tensor(self, part: Part, packing: Packing, number: int) -> str:
        module, fused = module_of(part.tensor)
        return packing.tensor_name(module, packing.components[number], fused)

    def _scales(self, some: list[tuple[Part, Packing | None]]) -> str:
        """The kind of scales: dtype, group, and differences of gate and up."""
        part, packing = some[0]
        if packing is None:
            return ""
        numbers = [number for number, one in enumerate(packing.components) if one.field in ("scales", "absmax")]
        if not numbers:
            return "in the blocks"
        dtype = self._reader.stored_dtype(self._tensor(part, packing, numbers[0]))
        text = dtype
        if packing.scheme is not None:
            format = packing.format
            text += f" per {format.group_rows or 'all'} x {format.group_columns or 'all'}"
        whole = [number for number, one in enumerate(packing.components) if one.field == "whole"]
        if packing.scheme is not None and packing.format.group_rows is None:
            whole = numbers
        if whole and "gate" in part.tensor:
            pairs: dict[str, set[float]] = {}
            for one, other in some:
                if other is packing:
                    scale = float(self._reader.tensor(self._tensor(one, packing, whole[0]))[:].reshape(-1)[0])
                    pairs.setdefault(one.tensor.rpartition(".experts.")[2].split(".")[0], set()).add(scale)
            text += ", gate and up have scales that differ" if any(len(pair) > 1 for pair in pairs.values()) else ""
        return text

    def _bad_scales(self, some: list[tuple[Part, Packing | None]]) -> Iterator[str]:
        counts: Counter[str] = Counter()
        where: dict[str, str] = {}
        for part, packing in some:
            for number, component in enumerate(packing.components if packing is not None else ()):
                assert packing is not None
                name = self._tensor(part, packing, number)
                if component.field not in ("scales", "absmax", "whole") or name not in self._index.files:
                    continue
                exponents = packing.scheme is not None and packing.format.has_e8m0_scales
                raw = self._reader.tensor(name)[:]
                scales = raw if component.decode is None else component.decode(raw)
                for kind, count in bad_scales(scales, exponents).items():
                    counts[kind] += count
                    where.setdefault(kind, name)
        for kind, count in counts.items():
            yield f"{count} {kind} scales, first in {where[kind]}"

    def _same_experts(self, pairs: tuple[tuple[Part, Packing | None], ...]) -> list[str]:
        """Dead experts (all zeros) and equal ones, by a few rows first and whole matrices then."""
        samples: dict[bytes, list[tuple[str, Callable[[], np.ndarray]]]] = {}
        problems = []
        for label, sample, whole in self._values(pairs):
            array = sample()
            if not array.size:
                continue
            if not np.any(array) and not np.any(whole()):
                problems.append(f"{label} is dead: all its values are 0")
                continue
            samples.setdefault(hashlib.sha256(array.tobytes()).digest(), []).append((label, whole))
        for group in samples.values():
            if len(group) > 1:
                digests: dict[bytes, list[str]] = {}
                for label, whole in group:
                    digests.setdefault(hashlib.sha256(whole().tobytes()).digest(), []).append(label)
                problems += [f"{', '.join(some)} hold equal values" for some in digests.values() if len(some) > 1]
        return problems[:_MOST_LISTED] + (
            [f"{len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        )

    def _values(
        self, pairs: tuple[tuple[Part, Packing | None], ...]
    ) -> Iterator[tuple[str, Callable[[], np.ndarray], Callable[[], np.ndarray]]]:
        """(name, some rows, all rows) of the values of each expert's matrix."""
        for part, packing in pairs:
            name = part.tensor if packing is None else self._tensor(part, packing, 0)
            tensor, shape = self._reader.tensor(name), self._reader.stored_shape(name)
            middle = shape[0] // 2 if shape else 0
            if len(part.shape) == 3:
                for expert in range(shape[0]):
                    read = lambda tensor=tensor, expert=expert: tensor[expert : expert + 1].view(np.uint8)  # noqa: E731
                    yield f"{name}[{expert}]", read, read
            else:
                some = slice(middle, middle + _SAMPLE_ROWS)
                yield (
                    name,
                    lambda tensor=tensor, some=some: tensor[some].view(np.uint8),
                    lambda tensor=tensor: tensor[:].view(np.uint8),
                )
