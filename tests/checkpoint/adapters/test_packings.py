"""Packings of LoRA factors, each written element by element from its definition and read in one canonical form."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.checkpoint.adapters import PACKINGS, ExpertAdapter, packings, read_adapter, write_adapter
from moe_core.checkpoint.adapters.files import _opened
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.specs import Activation

E, D, F, R = 3, 6, 4, 2
PATH, PREFIX = "model.layers.7.mlp.experts", "base_model.model."
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": R, "lora_alpha": 5, "peft_version": "0.21.2"}
TARGETS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def base(weight_layout: str = "out_in", d_model: int = D, d_ff: int = F, **options: Any) -> MoELayerSpec:
    options = {"gate_layout": "halves", **options}
    return MoELayerSpec(d_model, d_ff, E, 2, experts=ExpertsSpec(weight_layout=weight_layout, **options))


def factors(spec: MoELayerSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """a1 `[E, D, R]`, b1 `[E, R, 2F]`, a2, b2: all different numbers."""
    width = spec.experts.activation.input_width(spec.d_ff)
    random, sizes = np.random.default_rng(seed), ((spec.d_model, width), (spec.d_ff, spec.d_model))
    shapes = {}
    for number, (inputs, outputs) in enumerate(sizes, 1):
        shapes |= {f"a{number}": (E, inputs, R), f"b{number}": (E, R, outputs)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def nested(wanted: Mapping[str, np.ndarray], order: str = "fastest", swapped: bool = False) -> dict[str, np.ndarray]:
    """PEFT's tensors, filled one number after the other."""
    tensors = {}
    for number, root in ((1, f"{PATH}.base_layer"), (2, PATH)):
        a, b = wanted[f"a{number}"], wanted[f"b{number}"]
        rows, columns = (b.transpose(0, 2, 1), a.transpose(0, 2, 1)) if swapped else (a, b)
        packed_a = np.empty((E * R, rows.shape[1]), np.float32)
        packed_b = np.empty((columns.shape[2], E * R), np.float32)
        for e, j in itertools.product(range(E), range(R)):
            packed_a[e * R + j] = rows[e, :, j]
            packed_b[:, j * E + e if order == "fastest" else e * R + j] = columns[e, j]
        tensors |= {f"{PREFIX}{root}.lora_A.weight": packed_a, f"{PREFIX}{root}.lora_B.weight": packed_b}
    return tensors


def projections(wanted: Mapping[str, np.ndarray], stacked: bool = False) -> dict[str, np.ndarray]:
    """A module for each projection. Gate and up have the same A."""
    tensors = {}
    for name, number, columns in (("gate", 1, slice(0, F)), ("up", 1, slice(F, 2 * F)), ("down", 2, slice(0, D))):
        for side, factor in (("A", wanted[f"a{number}"]), ("B", wanted[f"b{number}"][..., columns])):
            if stacked:
                tensors[f"{PREFIX}{PATH}.{name}_proj.lora_{side}.weight"] = factor.transpose(0, 2, 1)
                continue
            for e in range(E):
                tensors[f"{PREFIX}{PATH}.{e}.{name}_proj.lora_{side}.weight"] = factor[e].T
    return tensors


def in_qwix(wanted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    columns = {"wi_0": slice(0, F), "wi_1": slice(F, 2 * F)}
    tensors = {f"layers.7.moe.{name}_lora_a": wanted["a1"] for name in columns}
    tensors |= {f"layers.7.moe.{name}_lora_b": wanted["b1"][..., place] for name, place in columns.items()}
    return tensors | {"layers.7.moe.wo_lora_a": wanted["a2"], "layers.7.moe.wo_lora_b": wanted["b2"]}


WRITTEN = {
    "peft": nested,
    "peft-0.18": lambda wanted: nested(wanted, swapped=True),
    "peft-0.19.0": lambda wanted: nested(wanted, swapped=True),
    "vllm-3d": nested,
    "vllm-2d": projections,
    "unsloth-old": lambda wanted: nested(wanted, "slowest"),
    "axolotl": nested,
    "axolotl-scattermoe": lambda wanted: nested(wanted, "slowest"),
    "megatron-bridge": lambda wanted: projections(wanted, stacked=True),
    "qwix": in_qwix,
}


def read(tensors: Any, spec: MoELayerSpec | None = None, packing: str | None = "peft", **options: Any) -> Any:
    settings = SETTINGS | {"target_parameters": TARGETS} | options.pop("settings", {})
    return read_adapter(tensors, spec or base(), packing=packing, settings=settings, **options)


def assert_canonical(layer: ExpertAdapter, wanted: Mapping[str, np.ndarray]) -> None:
    for number, name in ((1, "gate_up"), (2, "down")):
        pair = layer.pairs()[name]
        np.testing.assert_array_equal(pair.a, wanted[f"a{number}"], err_msg=name)
        np.testing.assert_array_equal(pair.b, wanted[f"b{number}"], err_msg=name)
        assert pair.scale.tolist() == [2.5] * E and pair.ranks.tolist() == [R] * E


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing(packing: str, tmp_path: Path) -> None:
    """Read from its definition, written with equal tensors, and read from its file without a name."""
    assert WRITTEN.keys() == PACKINGS.keys()
    wanted = factors(base())
    tensors = WRITTEN[packing](wanted)
    version = {"peft_version": f"{packing[5:]}.0"[:6]} if packing.startswith("peft-") else {}
    adapter = read(tensors, packing=packing, settings=version)
    assert_canonical(adapter.layer(7), wanted)
    write_adapter(tmp_path / "new", adapter, packing=packing)
    again = read_adapter(tmp_path / "new", base())
    assert_canonical(again.layer(7), wanted)
    written = _opened(tmp_path / "new")[0]
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


@pytest.mark.parametrize("source, target", [(one, two) for one in PACKINGS for two in PACKINGS if one != two])
def test_from_each_to_each(source: str, target: str, tmp_path: Path) -> None:
    wanted = factors(base(), 1)
    adapter = read(WRITTEN[source](wanted), packing=source, settings={"peft_version": None})
    if source == "qwix":
        if PACKINGS[target].kind == "projections":
            with pytest.raises(InvalidInput, match=r"must end in experts .* got layers.7.moe; rename them"):
                write_adapter(tmp_path / "old", adapter, packing=target)
        adapter = dataclasses.replace(adapter, layers={PATH: adapter.layer(7)})
    write_adapter(tmp_path / "new", adapter, packing=target)
    layer = read_adapter(tmp_path / "new", base(), packing=target).layer(7)
    assert_canonical(layer, wanted)


def test_planted_order_is_another_adapter() -> None:
    """Shapes cannot tell the order of B."""
    wanted = factors(base())
    wrong = read(nested(wanted, "slowest"))
    assert not np.array_equal(wrong.layer(7).gate_up.b, wanted["b1"])
    right = read(nested(wanted)).layer(7)
    assert np.array_equal(np.sort(wrong.layer(7).gate_up.b, None), np.sort(right.gate_up.b, None))


def test_in_out_bases_were_swapped_in_one_version() -> None:
    wanted, spec = factors(base()), base("in_out")
    for version in ("0.18.1", "0.19.0", "0.19.1"):
        tensors = nested(wanted, swapped=version == "0.19.0")
        assert_canonical(read(tensors, spec, None, settings={"peft_version": version}).layer(7), wanted)


def test_roles_are_told_by_shapes_or_version() -> None:
    spec = base(d_model=4)  # down has as many inputs as outputs
    wanted = factors(spec)
    with pytest.raises(InvalidInput, match=r"roles of peft-0.19.0 or peft-0.18: name that packing"):
        read(nested(factors(base()), swapped=True))
    with pytest.raises(InvalidInput, match="roles of peft: name that packing"):
        read(nested(factors(base())), packing="peft-0.18", settings={"peft_version": "0.18.0"})
    for packing, version in (("peft", "0.18.1"), ("peft-0.18", "0.20.0")):
        only = {name: tensor for name, tensor in nested(wanted).items() if "base_layer" not in name}
        with pytest.raises(InvalidInput, match="must be decided where inputs and outputs are both 4"):
            settings = {"peft_version": version, "target_parameters": ["experts.down_proj"]}
            read(only, spec, packing, settings=settings)
    # The version names the packing, here of a swapped file.
    adapter = read(nested(wanted, swapped=True), spec, None, settings={"peft_version": "0.18.1"})
    assert adapter.packing == "peft-0.18"
    assert_canonical(adapter.layer(7), wanted)


@pytest.mark.parametrize(
    "settings", [{"peft_version": None}, {"target_parameters": None}, {"peft_version": "0.18.2.dev0"}]
)
def test_a_packing_is_never_guessed(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"packing must be named .* got None; name one of peft, peft-0.18"):
        read(nested(factors(base())), packing=None, settings=settings)


def test_separate_factors_of_gate_and_up(tmp_path: Path) -> None:
    """A becomes [A_gate | A_up] and B block-diagonal. Columns lie as the base's, and files have one module each."""
    random, tensors = np.random.default_rng(2), projections(factors(base()))
    for name in [name for name in tensors if "up_proj.lora_A" in name]:
        tensors[name] = random.standard_normal((R, D)).astype(np.float32)
    for gate_layout in ("halves", "interleaved"):
        spec = base(gate_layout=gate_layout)
        adapter = read(tensors, spec, "vllm-2d")
        pair = adapter.layer(7).pairs()["gate_up"]
        assert pair.separate and pair.a.shape == (E, D, 2 * R) and pair.ranks.tolist() == [2 * R] * E
        for e in range(E):
            change = pair.change(e)
            halves = (change[:, :F], change[:, F:]) if gate_layout == "halves" else (change[:, ::2], change[:, 1::2])
            for name, columns in zip(("gate", "up"), halves, strict=True):
                a, b = (tensors[f"{PREFIX}{PATH}.{e}.{name}_proj.lora_{side}.weight"] for side in "AB")
                np.testing.assert_allclose(columns, 2.5 * (b @ a).T, rtol=1e-5)
        write_adapter(tmp_path / gate_layout, adapter, packing="vllm-2d")
        written = _opened(tmp_path / gate_layout)[0]
        assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
        # PEFT's packing has one pair of twice the rank, and the same scale.
        write_adapter(tmp_path / f"{gate_layout}-peft", adapter)
        whole = read_adapter(tmp_path / f"{gate_layout}-peft", spec)
        assert (whole.settings["r"], whole.settings["lora_alpha"]) == (2 * R, 10)
        np.testing.assert_allclose(whole.layer(7).pairs()["gate_up"].change(1), pair.change(1), rtol=1e-5)


def test_shared_factors_and_uneven_ranks() -> None:
    """Megatron-Bridge's shared-outer form, and ranks by pattern."""
    tensors = projections(factors(base()))
    for name in ("gate_proj.lora_A", "up_proj.lora_A", "down_proj.lora_B"):
        stacked = tensors[f"{PREFIX}{PATH}.0.{name}.weight"][None]
        tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(f"{name}.weight")}
        tensors[f"{PREFIX}{PATH}.{name}.weight"] = stacked
    layer = read(tensors, packing="megatron-bridge").layer(7)
    assert (layer.gate_up.a == layer.gate_up.a[:1]).all() and (layer.down.b == layer.down.b[:1]).all()
    assert not layer.gate_up.separate and not np.array_equal(layer.gate_up.b[0], layer.gate_up.b[1])

    tensors = projections(factors(base()))
    tensors |= {f"{PREFIX}{PATH}.1.down_proj.lora_A.weight": np.ones((5, F), np.float32)}
    tensors |= {f"{PREFIX}{PATH}.1.down_proj.lora_B.weight": np.ones((D, 5), np.float32)}
    patterns = {"rank_pattern": {r"experts\.1.down_proj": 5}, "alpha_pattern": {"1.down_proj": 10}}
    pair = read(tensors, packing="vllm-2d", settings=patterns).layer(7).down
    assert pair.ranks.tolist() == [2, 5, 2] and pair.scale.tolist() == [2.5, 2.0, 2.5]
    assert not pair.a[0, :, 2:].any() and (pair.change(1) == 10).all()


def test_operands_are_padded_with_zeros() -> None:
    wanted = factors(base())
    operands = read(nested(wanted)).layer(7).operands()
    shapes = {name: None if array is None else array.shape for name, array in operands.items()}
    assert shapes == {
        "a1": (E, D, 16), "b1": (E, 16, 2 * F), "a2": (E, F, 16), "b2": (E, 16, D), "scale": (E,), "ranks": (E,)
    }  # fmt: skip
    for name in ("a1", "a2"):
        array = operands[name]
        assert array is not None and np.array_equal(array[..., :R], wanted[name]) and not array[..., R:].any()
    scales = {"alpha_pattern": {"experts.down_proj": 1}}
    with pytest.raises(Unsupported, match=r"must have one scale, got 2.5 and 0.5"):
        read(nested(wanted), settings=scales).layer(7).operands()


def test_one_product_alone_and_ungated(tmp_path: Path) -> None:
    tensors = nested(factors(base()))
    only = {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items() if "base_layer" in name}
    layer = read(only, settings={"target_parameters": [f"{PATH}.gate_up_proj"]}).layer(PATH)
    assert layer.down is None and layer.gate_up is not None and layer.operands()["a2"] is None
    spec = base(activation=Activation("relu2", gated=False), gate_layout=None)
    ungated = read(nested(factors(spec)), spec, settings={"target_parameters": ["experts.up_proj", TARGETS[0]]})
    assert_canonical(ungated.layer(7), factors(spec))
    write_adapter(tmp_path / "new", ungated, packing="vllm-2d")
    assert_canonical(read_adapter(tmp_path / "new", spec).layer(7), factors(spec))


def test_rslora_and_patterns() -> None:
    settings = {"use_rslora": True, "r": 9, "rank_pattern": {"mlp.experts.(down_proj": 2}}
    with pytest.raises(Unsupported, match=r"rank_pattern must have names"):
        read(nested(factors(base())), settings=settings)
    settings["rank_pattern"] = {"experts.down_proj": R, "layers.7.mlp.experts.gate_up_proj": R}
    pair = read(nested(factors(base())), settings=settings).layer(7).down
    np.testing.assert_allclose(pair.scale, 5 / R**0.5)


def test_the_router_has_its_factors_and_scale() -> None:
    a, b = np.arange(R * D, dtype=np.float32).reshape(R, D), np.arange(E * R, dtype=np.float32).reshape(E, R)
    gate = {f"{PREFIX}model.layers.7.mlp.gate.lora_{name}.weight": array for name, array in (("A", a), ("B", b))}
    pair = read(nested(factors(base())) | gate).layer(7).router
    assert (pair.scale.tolist(), pair.ranks.tolist()) == ([5 / R], [R])
    np.testing.assert_array_equal(pair.a[0], a.T)
    np.testing.assert_array_equal(pair.b[0], b.T)


@pytest.mark.parametrize(
    "entry",
    [{"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}, {"bias": "all"}, {"peft_type": "LOHA"},
     {"alora_invocation_tokens": [1]}, {"an_option_of_tomorrow": 3}, {"layer_replication": [[0, 1]]}],
)  # fmt: skip
def test_settings_that_change_results_are_refused_by_name(entry: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=f"{next(iter(entry))} (of the adapter )?must"):
        read(nested(factors(base())), settings=entry)


def test_settings_that_tell_how_an_adapter_was_made_are_kept() -> None:
    names = (
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core"),
        *("modules_to_save", "eva_config", "runtime_config", "ensure_weight_tying", "loftq_config"),
        *("qalora_group_size", "peft_version", "bias", "init_lora_weights"),
    )
    told = {"peft_version": "0.21.0", "bias": "none"}
    settings = {name: told.get(name, "told") for name in names}
    assert settings.items() <= read(nested(factors(base())), settings=settings).settings.items()


def test_every_tensor_counts(tmp_path: Path) -> None:
    tensors = nested(factors(base()))
    router = {f"{PREFIX}model.layers.7.mlp.router.lora_A.weight": np.ones((2, D), np.float32)}
    with pytest.raises(InvalidInput, match=r"got 1 others, such as .*router.lora_A"):
        read(tensors | router)
    adapter = read(tensors | router, others=True)
    write_adapter(tmp_path / "new", adapter)
    assert _opened(tmp_path / "new")[0].keys() == (tensors | router).keys()
    with pytest.raises(InvalidInput, match=r"must hold .*base_layer.lora_A.weight and lora_B"):
        read({name: tensor for name, tensor in tensors.items() if "base_layer.lora_B" not in name})
    with pytest.raises(InvalidInput, match="layer 7 must have gate and up together or apart, got both"):
        packings._first("layer 7", dict.fromkeys(("gate", "gate_up"), Any), base())
    assert packings._first("layer 7", {"gate_up": Any}, base()) is Any
    missing = {name: one for name, one in projections(factors(base())).items() if ".2.up_proj.lora_B" not in name}
    with pytest.raises(InvalidInput, match="for each of 3 experts"):
        read(missing, packing="vllm-2d")
    stacked = {f"{PREFIX}{PATH}.up_proj.lora_A.weight": np.ones((1, R, D), np.float32)}
    with pytest.raises(InvalidInput, match=r"got 1 others, such as .*experts.up_proj.lora_A"):
        read(stacked | projections(factors(base())), packing="vllm-2d")
    with pytest.raises(InvalidInput, match="must have factors of experts in the packing vllm-2d"):
        read(tensors, packing="vllm-2d")
    with pytest.raises(InvalidInput, match=r"r of .* must be the rank of its factors, got 7"):
        read(projections(factors(base())), packing="vllm-2d", settings={"r": 7})
    with pytest.raises(InvalidInput, match="rank 7"):
        read(tensors, settings={"r": 7})


def test_files_that_disagree(tmp_path: Path) -> None:
    adapter = read(nested(factors(base()), "slowest"), packing="unsloth-old")
    write_adapter(tmp_path / "new", adapter, packing="unsloth-old")
    assert read_adapter(tmp_path / "new", base()).packing == "unsloth-old"
    with pytest.raises(InvalidInput, match="packing must be unsloth-old, which the file's metadata name, got peft"):
        read_adapter(tmp_path / "new", base(), packing="peft")
    with pytest.raises(InvalidInput, match="must be a new or empty directory"):
        write_adapter(tmp_path / "new", adapter)
    (tmp_path / "new" / "adapter_config.json").unlink()
    with pytest.raises(InvalidInput, match="settings must be"):
        read_adapter(tmp_path / "new", base())
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").touch()
    with pytest.raises(InvalidInput, match=r"among adapter_model.bin; save the adapter as safetensors"):
        read_adapter(tmp_path / "pickle", base())
    with pytest.raises(InvalidInput, match="layer must be the number or path of one layer"):
        adapter.layer(3)
    nested_path = dataclasses.replace(adapter, layers={"models.0.layers.7.mlp": adapter.layer(7)})
    assert nested_path.path(7) == "models.0.layers.7.mlp", "the last number is the layer's"


def test_settings_are_kept_where_ranks_are(tmp_path: Path) -> None:
    settings = {"rank_pattern": {"experts.down_proj": R}, "task_type": "CAUSAL_LM", "revision": "main"}
    write_adapter(tmp_path / "new", read(nested(factors(base())), settings=settings))
    written = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert written == SETTINGS | {"target_parameters": TARGETS} | settings
