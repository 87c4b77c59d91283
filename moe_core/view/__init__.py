"""Pages to look at: routing traces, parity reports and plans, each one self-contained HTML file.

    moebius-view routing.safetensors                        # a trace: load, entropy, pairs, tokens, placement
    moebius-view before.safetensors after.safetensors       # two traces side by side
    moebius-view parity.json                                # a report of moe-parity --json
    moebius-view plans.json                                 # of layer.explain(tokens).save(path)

A page needs no network, no server and no other file. Its charts are drawn by a few functions of its own on canvas and
SVG: a plotting library would add 1 to 4 MB to each page, and its heat maps of 48 layers are slower.
"""

from moe_core.view.page import plan_page, report_page, trace_page, view_page

__all__ = ["plan_page", "report_page", "trace_page", "view_page"]
