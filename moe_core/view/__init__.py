"""Pages to look at: routing traces, parity reports and plans, each one self-contained HTML file with its own charts."""

from moe_core.view.page import plan_page, report_page, trace_page, view_page

__all__ = ["plan_page", "report_page", "trace_page", "view_page"]
