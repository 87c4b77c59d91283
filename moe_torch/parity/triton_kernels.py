"""Upstream triton_kernels as a parity engine, for cases with the same semantics.

It uses `routing` and `matmul_ogs` of the 3.5 releases, and needs a GPU. Upstream orders a token's experts by ascending
id and has no router product, so it gets the reference's logits. Its one fused activation is the clamped swiglu on
interleaved weights; for silu it gets the reference's activations. Of quantised weights it takes mxfp4.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.prepack.prepack import untile
from moe_core.ops.router.reference import router
from moe_core.parity.case import Case
from moe_core.parity.devices import use_gpu
from moe_core.parity.engines import EngineRun
from moe_core.parity.reference_engine import reference_stages
from moe_core.runtime.cuda import cuda_target, driver
from moe_core.specs.operands import TopK
from moe_torch.layers.weights import to_numpy
from moe_torch.parity.torch import to_torch

_INSTALL = (
    "put python/triton_kernels of the Triton repository (github.com/triton-lang/triton, tag v3.5.1) on PYTHONPATH; the "
    "distribution named triton-kernels on the package index is an unrelated project"
)


#: As upstream's layout of mxfp4 scales on Hopper.
_SCALE_LAYOUT_WARPS = 8


class _Upstream:
    """Raises Unsupported if upstream cannot be imported."""

    def __init__(self) -> None:
        try:
            matmul, routing, swiglu = (
                importlib.import_module(f"triton_kernels.{name}") for name in ("matmul_ogs", "routing", "swiglu")
            )
            self.routing, self.matmul_ogs, self.precision = routing.routing, matmul.matmul_ogs, matmul.PrecisionConfig
            self._fused, self._specs, self._swiglu = matmul.FusedActivation, matmul.FnSpecs, swiglu.swiglu_fn
            self._tensor = importlib.import_module("triton_kernels.tensor")
            self._layout = importlib.import_module("triton_kernels.tensor_details.layout")
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"upstream triton_kernels cannot be used ({error}); {_INSTALL}") from error

    def swiglu(self, alpha: float, limit: float | None) -> Any:
        return self._fused(self._specs("swiglu", self._swiglu, ("alpha", "limit")), (alpha, limit), 2)

    def mxfp4(self, values: torch.Tensor, scales: torch.Tensor) -> tuple[Any, Any]:
        """(weight, scales) in upstream's layouts, from uint8 `[E, K / 2, N]` and `[E, K / 32, N]`."""
        tensor, layout = self._tensor, self._layout
        chosen, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        weight = tensor.convert_layout(tensor.wrap_torch_tensor(values, dtype=tensor.FP4), chosen, **options)
        chosen, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=_SCALE_LAYOUT_WARPS)
        return weight, tensor.convert_layout(tensor.wrap_torch_tensor(scales), chosen, **options)


class TritonKernelsEngine:
    """Upstream's routing and grouped matmuls on the first GPU."""

    name = "triton_kernels"

    def __init__(self) -> None:
        if not (use_gpu() and torch.cuda.is_available()):
            raise Unsupported(
                "upstream triton_kernels needs a CUDA GPU (and TRITON_INTERPRET unset), got none"
                "; run it on such a machine"
            )
        self._upstream = _Upstream()
        self._device = torch.device("cuda", 0)

    def why_unsupported(self, case: Case) -> str | None:
        """Return the first reason why the case is outside upstream's semantics, or None."""
        rule = case.router
        if case.dtype != "bfloat16":
            return f"upstream is compared in bfloat16, the case is {case.dtype}"
        if rule.scoring != "softmax" or rule.scale != 1.0:
            return f"upstream routes by an unscaled softmax, the case by {rule.scoring} scaled by {rule.scale:g}"
        if rule.num_groups > 1 or case.routing.correction_bias is not None:
            return "upstream has neither grouped top-k nor a correction bias"
        if case.top_k & (case.top_k - 1):
            return f"upstream's top-k takes powers of two, the case has K = {case.top_k}"
        if case.token_mask is not None:
            return "upstream has no token mask"
        if case.shared is not None:
            return "upstream has no shared experts"
        scheme = case.scheme
        if scheme is not None and (scheme.weights.element != "e2m1" or scheme.activations is not None):
            return f"of quantised weights upstream takes mxfp4 with plain rows, the case is {scheme}"
        if case.spec.apply_router_weight_on_input:
            return "upstream weights the second product, the case its input"
        if not self._fuses(case) and case.spec.activation.name == "swiglu_oai":
            return f"upstream's swiglu takes interleaved columns, the case has {case.spec.activation.gate_layout}"
        return None

    @staticmethod
    def _fuses(case: Case) -> bool:
        activation = case.spec.activation
        return activation.name == "swiglu_oai" and activation.gate_layout == "interleaved"

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        """All stages in ascending id order."""
        progress("all stages")
        logits = router(case.x, case.routing.weight, case.routing.bias, spec=case.logits_spec)
        forward = _Forward(self._upstream, case, self._device, logits)
        stages = {"logits": logits, "ids": forward.ids, "weights": forward.weights, "matmul1": forward.matmul1()}
        supplied = ["logits"]
        if self._fuses(case):
            stages["activation"] = forward.activation()
        else:
            stages["activation"] = reference_stages(case, TopK(forward.ids, forward.weights))["activation"]
            supplied.append("activation")
        stages["matmul2"], stages["output"] = forward.matmul2(stages["activation"])
        device = f"cuda sm_{cuda_target(0).arch} {driver().name(0)}"
        return EngineRun(self.name, device, stages, given=tuple(supplied), slot_order="expert")


class _Forward:
    def __init__(self, upstream: _Upstream, case: Case, device: torch.device, logits: np.ndarray) -> None:
        self._upstream, self._case, self._device = upstream, case, device
        rule = case.router
        # The same as a softmax over the chosen logits.
        softmax_first = rule.order == "softmax_then_topk" and not rule.renormalize
        self._data, self._gather, self._scatter = upstream.routing(
            to_torch(logits, device), case.top_k, sm_first=softmax_first
        )
        self._slot_of_row = to_numpy(self._gather.src_indx)
        shape = (len(logits), case.top_k)
        experts = np.repeat(np.arange(case.num_experts, dtype=np.int32), to_numpy(self._data.expt_hist))
        self.ids = self._by_slot(experts).reshape(shape)
        self.weights = self._by_slot(to_numpy(self._data.gate_scal)).reshape(shape)
        self._x = to_torch(case.x, device)

    def _by_slot(self, rows: np.ndarray) -> np.ndarray:
        slots = np.empty_like(rows)
        slots[self._slot_of_row] = rows
        return slots

    def _weight(self, weight: Any) -> tuple[Any, Any]:
        """`[E, inputs, outputs]`, as upstream takes weights, and the PrecisionConfig with their scales."""
        in_out = self._case.spec.weight_layout == "in_out"
        if not isinstance(weight, QuantizedTensor):
            return to_torch(weight if in_out else weight.swapaxes(1, 2), self._device), self._upstream.precision()
        weight = untile(weight)
        # Upstream wants neighbouring bytes along the inputs.
        rows = [array.swapaxes(1, 2) if in_out else array for array in (weight.values, weight.scales)]
        packed, scales = self._upstream.mxfp4(*(to_torch(array, self._device).mT for array in rows))
        return packed, self._upstream.precision(weight_scale=scales)

    def _bias(self, bias: np.ndarray | None) -> torch.Tensor | None:
        return None if bias is None else to_torch(bias, self._device).float()

    def _first(self, weight: Any, bias: np.ndarray | None, fused: Any = None) -> np.ndarray:
        matrix, precision = self._weight(weight)
        options = {"gather_indx": self._gather, "precision_config": precision, "fused_activation": fused}
        rows = self._upstream.matmul_ogs(self._x, matrix, self._bias(bias), self._data, **options)
        return self._by_slot(to_numpy(rows))

    def matmul1(self) -> np.ndarray:
        """`[T * K, 2F]` before the activation."""
        experts = self._case.experts
        gate = self._first(experts.gate_up, experts.gate_up_bias)
        if experts.up is None:
            return gate
        return np.concatenate([gate, self._first(experts.up, experts.up_bias)], axis=1)

    def activation(self) -> np.ndarray:
        experts, activation = self._case.experts, self._case.spec.activation
        assert activation.alpha is not None
        fused = self._upstream.swiglu(activation.alpha, activation.limit)
        return self._first(experts.gate_up, experts.gate_up_bias, fused)

    def matmul2(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weighted slots `[T * K, D]`, their sum per token `[T, D]`)."""
        experts = self._case.experts
        rows = to_torch(hidden[self._slot_of_row], self._device)
        matrix, precision = self._weight(experts.down)
        operands = (rows, matrix, self._bias(experts.down_bias), self._data)
        options = {"precision_config": precision, "gammas": self._data.gate_scal}
        slots = self._upstream.matmul_ogs(*operands, **options)
        output = self._upstream.matmul_ogs(*operands, scatter_indx=self._scatter, **options)
        return self._by_slot(to_numpy(slots)), to_numpy(output)
