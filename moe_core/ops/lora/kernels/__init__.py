from moe_core.base.lazy import keep_unloaded

keep_unloaded(__name__)
