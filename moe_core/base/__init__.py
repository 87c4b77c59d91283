"""Specs of arrays, checks, targets and caches: the names that most planners need."""

from moe_core.base.arrays import ALIGNMENT, TRANSPOSED, WEIGHT_LAYOUTS, ArraySpec, require_spec, row_stride
from moe_core.base.checks import as_integer, require_at_least, require_choice, require_kind, set_integer
from moe_core.base.codec import plan_type
from moe_core.base.recent import Recent, keep_plans, process_lock
from moe_core.base.sizes import INT32_LIMIT, padded
from moe_core.base.target import Target, cpu_target
