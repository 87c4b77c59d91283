"""Plans: what will run, decided in pure Python over specs, before any array exists."""

from moe_core.plan.registry import export_plans as export_plans
from moe_core.plan.registry import load_plans as load_plans
