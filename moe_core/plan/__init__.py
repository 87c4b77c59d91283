"""Plans: what will run, decided in pure Python over specs, before any array exists."""

from moe_core.plan.registry import export_plans, load_plans

__all__ = ["export_plans", "load_plans"]
