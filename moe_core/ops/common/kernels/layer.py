import triton
import triton.language as tl


@triton.jit
def layer_in_stack(layer_index, NUM_LAYERS: tl.constexpr):
    """Return (index inside the stack, 0 for a layer outside, True if the layer exists). None: one layer."""
    index, exists = tl.cast(0, tl.int32), tl.cast(True, tl.int1)
    if layer_index is not None:
        wanted = tl.load(layer_index)
        exists = (wanted >= 0) & (wanted < NUM_LAYERS)
        index = tl.where(exists, wanted, 0)
    return index, exists
