"""Layers whose quantised experts are put into the order of Hopper's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from moe_core.errors import Unsupported
from moe_core.layers import HUGGING_FACE, MoELayerSpec, Storage, tiled_specs
from moe_core.specs.operands import ExpertWeights, named_arrays
from moe_torch.layers.parameters import ExpertParameters
from moe_torch.prepack import prepack_weights, restore_weights


class PrepackedExperts(torch.nn.Module):
    """The methods of a layer that re-lay its experts in place."""

    spec: MoELayerSpec
    storage: Storage
    experts: ExpertParameters
    _is_quantized: bool

    @property
    def is_prepacked(self) -> bool:
        """Whether the experts' matrices lie as `prepack_weights` puts them."""
        return self._is_quantized and self.experts.down.spec.tiling is not None

    def prepack_weights(self) -> None:
        """Put the experts' quantised matrices into the order of Hopper's kernels, in place, as
        `moe_torch.prepack_weights` does; call it when the weights are loaded.

        The layer has no gradients then: call it under `torch.no_grad()`, and train after `restore_weights`. state_dict,
        load_state_dict, load_weights and export_weights keep the published layout, so that checkpoints fit prepacked
        layers and others; only the buffers themselves are tiled. Raises InvalidInput for experts that are not
        quantised, not stored `out_in` or that cannot be tiled, and Unsupported for sharded ones.
        """
        tiled_specs(self.spec, self.storage)
        matrices = self._matrices()
        for name, array in named_arrays(matrices, "experts."):
            if hasattr(array, "full_tensor"):
                raise Unsupported(f"{name} is a sharded DTensor; call prepack_weights before sharding")
        self._hold(prepack_weights(matrices, self.spec.moe_spec(HUGGING_FACE)))

    def restore_weights(self) -> None:
        """The inverse of `prepack_weights`, in place; a layer that is not prepacked stays as it is."""
        if self.is_prepacked:
            self._hold(restore_weights(self._matrices()))

    @contextlib.contextmanager
    def published(self) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters and buffers by name, to be written to, in the published layout while the `with` block runs."""
        prepacked = self.is_prepacked
        self.restore_weights()
        try:
            yield self._tensors()
        finally:
            if prepacked:
                self.prepack_weights()

    def restored_tensors(self) -> dict[str, torch.Tensor]:
        """The arrays of prepacked matrices in their published layout, by name; none of other layers."""
        return dict(named_arrays(restore_weights(self._matrices()), "experts.")) if self.is_prepacked else {}

    def _matrices(self) -> ExpertWeights:
        return ExpertWeights(self.experts.gate_up.tensor(), self.experts.down.tensor())

    def _hold(self, matrices: ExpertWeights) -> None:
        self.experts.gate_up.hold(matrices.gate_up)
        self.experts.down.hold(matrices.down)
        self._set_options()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        raise NotImplementedError

    def _set_options(self) -> None:
        """Take over the matrices' layout."""
        raise NotImplementedError
