"""Plans: what will run, decided in pure Python over specs, before any array exists.

Planners raise InvalidInput for wrong arguments, and Unsupported for what a target or kernel cannot do. A plan's inputs
are the arrays that its planner takes, in order, unless the docstring lists others.
"""

from moe_core.plan.builder import PlanBuilder
from moe_core.plan.registry import Explanation as Explanation
from moe_core.plan.registry import export_plans as export_plans
from moe_core.plan.registry import load_plans as load_plans
from moe_core.plan.roles import Held, Role
from moe_core.plan.steps import Argument, Constant, KernelLaunch, LaunchPlan, Pointer, TensorMap, declare_kernel, passed
