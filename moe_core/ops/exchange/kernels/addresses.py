import triton
import triton.language as tl

#: Sections of an expert's row blocks that take turns when rows go to peers, usually the GPUs of a host. In order, all
#: owners would store at one home at a time: 230 GB/s instead of 340.
SECTIONS = tl.constexpr(8)


@triton.jit
def pointer_to(addresses, DTYPE: tl.constexpr):
    """Return addresses as pointers. Without the hint of multiples of 16, rows would move one element at a time."""
    if DTYPE == "bfloat16":
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.bfloat16)), [16])
    elif DTYPE == "float16":
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.float16)), [16])
    elif DTYPE == "float32":
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.float32)), [16])
    elif DTYPE == "int32":
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.int32)), [16])
    elif DTYPE == "int64":
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.int64)), [16])
    else:
        tl.static_assert(DTYPE == "uint8", "unknown dtype")
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.uint8)), [16])


@triton.jit
def place_of(owners, rows, slots, inside, num_ranks, num_rows):
    """Return (owner, int64 row, True if there is one) of slots."""
    owner = tl.load(owners + slots, mask=inside, other=-1)
    row = tl.load(rows + slots, mask=inside, other=-1).to(tl.int64)
    return owner, row, inside & (owner >= 0) & (owner < num_ranks) & (row >= 0) & (row < num_rows)


@triton.jit
def peer_rows(table, owner, row, present, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return pointers to rows of WIDTH elements in the peers' arrays. table: their addresses."""
    addresses = tl.load(table + owner, mask=present, other=0)
    return pointer_to(addresses, DTYPE) + row * WIDTH


@triton.jit
def slots_at(addresses, slots, exists, DTYPE: tl.constexpr):
    """Return (pointers, which slots have one). addresses int64 by slot, 0: nowhere."""
    targets = tl.load(addresses + slots, mask=exists, other=0)
    return pointer_to(targets, DTYPE), targets != 0
