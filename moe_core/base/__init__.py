"""Specs of arrays, targets and caches: the names that most planners need."""

from moe_core.base.arrays import ALIGNMENT, TRANSPOSED, WEIGHT_LAYOUTS, ArraySpec, require_spec, row_stride
from moe_core.base.recent import Recent, keep_plans, process_lock
from moe_core.base.target import Target, cpu_target
