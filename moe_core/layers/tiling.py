from __future__ import annotations

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, Tiling
from moe_core.layers.spec import MoELayerSpec, Storage
from moe_core.ops.prepack.prepack import order_for


def tiled_specs(spec: MoELayerSpec, storage: Storage) -> dict[str, QuantizedSpec]:
    """The specs of `experts.gate_up` and `experts.down` in a prepacked layer. storage: of the layer.

    Raises InvalidInput for experts that are not quantised `out_in`, or that cannot be tiled.
    """
    scheme = spec.experts.scheme
    if scheme is None or storage.weight_layout != "out_in":
        raise InvalidInput(
            f"prepack_weights takes layers of quantised experts stored out_in, got scheme {scheme} and "
            f"{storage.weight_layout}; make it with ExpertsSpec(scheme=..., weight_layout='out_in')"
        )
    order = order_for(storage.gate_layout if spec.gated else None, "experts.gate_up")
    rows = 2 * spec.d_ff if spec.gated else spec.d_ff
    gate_up, down = Tiling(rows, spec.d_model, order), Tiling(spec.d_model, spec.d_ff, "rows")
    tilings = {"experts.gate_up": gate_up, "experts.down": down}
    return {name: QuantizedSpec(scheme.weights, tiling=tiling) for name, tiling in tilings.items()}
