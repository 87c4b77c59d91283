"""Faults planted in copies of the backward's kernels, and the process that runs their op tests on each copy.

Run as a script: `python -m tests.support.faults.backward TESTS CONTROL FOLDER...`. pytest collects the file of tests
once; each folder of kernels has a fork that runs the tests on them up to the first failure and leaves pytest's exit
status in `status` in its folder, its output in `log` and the name of the failed test in `failed`. CONTROL holds
unchanged kernels: the last fork runs on them every test that failed in another.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.faults.kernel_copies import INTERPRETER, OpFault, run_on_copy

#: By kernel file; its tests are in TESTS. None reads or writes outside of its arrays.
FAULTS: dict[str, tuple[OpFault, ...]] = {
    "activation.kernels.formulas": (
        OpFault("share * (1.0 + bounded * (1.0 - share))", "share * (1.0 + bounded * share)"),
        OpFault("0.5 * twice + bounded * density", "0.5 * twice - bounded * density"),
        OpFault("1.0 + 0.134145 * square", "1.0 + 0.044715 * square"),
        OpFault("tl.where(gate > LIMIT, 0.0, d_gate)", "d_gate"),
        OpFault("tl.where((up > LIMIT) | (up < -LIMIT), 0.0, d_up)", "tl.where(up > LIMIT, 0.0, d_up)"),
        OpFault("bounded = clamp(x, 128.0)", "bounded = x"),
        OpFault(
            'if NAME != "clamped_silu":\n                gate =', 'if NAME == "swiglu_oai":\n                gate ='
        ),
        OpFault("tl.where(activated > LIMIT, LIMIT, activated) * up", "activated * up"),
        OpFault("up = softcap(up, LIMIT)\n        return softcap", "up = up\n        return softcap"),
        OpFault("size < 0.625, small", "size < 0.0, small"),
        OpFault("tl.where(activated > LIMIT, 0.0, d_gate)", "d_gate"),
        OpFault("tl.where(activated > LIMIT, LIMIT, activated)\n", "activated\n"),
        OpFault('if NAME != "clamped_silu":\n                g =', 'if NAME == "swiglu_oai":\n                g ='),
        OpFault("4.0 * power", "2.0 * power"),
        OpFault("activated * (1.0 - share)", "activated * share"),
    ),
    "activation.kernels.backward": (
        OpFault("tl.join(d_gate, d_up)", "tl.join(d_up, d_gate)"),
        OpFault("products += z * hidden", "products += upstream * hidden"),
        OpFault("total += tl.load(bias_product", "total -= tl.load(bias_product"),
        OpFault("(places < 0)", "(places < -1)"),
        OpFault("mask=present & ((places", "mask=(present == 0) & ((places"),
        OpFault("present = (slots >= 0) &", "present = (slots >= 1) &"),
        OpFault("weight[:, None] * hidden", "hidden"),
    ),
    "reduction.kernels.rowwise": (
        OpFault("tl.load(group_start + 1 + group", "tl.load(group_start + group"),
        OpFault("for first in range(0, NUM_EXPERTS, EXPERTS):", "for first in range(0, EXPERTS, EXPERTS):"),
        OpFault("0), NUM_LAYERS - 1)", "0), 0)"),
        OpFault("tokens = (slots // TOP_K)", "tokens = (slots * 0)"),
        OpFault("sigmoid(value) * sigmoid(-value)", "sigmoid(value) * sigmoid(value)"),
        OpFault("sigmoid(tl.load(gate", "(tl.load(gate"),
        OpFault("a + tl.load(second", "a - tl.load(second"),
        OpFault("value.to(y.dtype.element_ty)", "(1.001 * value).to(y.dtype.element_ty)"),
        OpFault("total = weight[:, None] * gradient", "total = gradient"),
        OpFault("total += tl.load(extra", "total -= tl.load(extra"),
        OpFault("partial += gradient * tl.load(x", "partial = gradient * tl.load(x"),
        OpFault("present = inside & (rows >= 0)", "present = inside & (rows >= 1)"),
    ),
    "matmul.portable.weight_gradient_kernel": (
        OpFault("tl.load(layer_index) == tl.program_id(2)", "tl.load(layer_index) >= tl.program_id(2)"),
        OpFault("(tl.load(row_mask + rows, mask=exists, other=0) != 0)", "True"),
        OpFault("source_rows(rows, slots, LEFT_GATHER", "source_rows(rows, rows, LEFT_GATHER"),
        OpFault("* RIGHT_STRIDE + RIGHT_START", "* RIGHT_STRIDE"),
        OpFault("other=0.0) + accumulator", "other=0.0) - accumulator"),
        OpFault("start = group * part_rows", "start = group * (part_rows - 1)"),
        OpFault("tile *= tl.load(row_weight", "tile += 0.0 * tl.load(row_weight"),
        OpFault("partial += tile", "partial = tile"),
        OpFault("for part in range(0, count):", "for part in range(1, count):"),
        OpFault("tl.load(layer_index) == tl.program_id(1)", "tl.load(layer_index) >= tl.program_id(1)"),
    ),
    "matmul.portable.kernel": (
        OpFault("tl.load(group_sizes + group, cache_modifier=CACHE)", "tl.load(group_sizes + group) - 1"),
    ),
    "common.kernels.rows": (OpFault("(slots // TOP_K)", "(slots * 0)"),),
    "routing.kernels.groups": (
        OpFault("tl.maximum(values, 0)", "values"),
        OpFault("tl.maximum(tl.associative_scan(values, 0, _larger), base)", "tl.maximum(values, base)"),
        OpFault("tl.cumsum(values, axis=0) + base", "tl.cumsum(values, axis=0)"),
        OpFault("places < skipped, base", "places < skipped + 1, base"),
        OpFault("fill_zeros(y, begin, base", "fill_zeros(y, begin, 0 * base"),
        OpFault("end * WIDTH, step", "0 * end, step"),
        OpFault("tl.zeros((BLOCK,), dtype=y", "tl.full((BLOCK,), 1.0, dtype=y"),
    ),
    "exchange.kernels.places": (
        OpFault("homes < rank, counted", "homes <= rank, counted"),
        OpFault("tl.cumsum(total, axis=0) - total", "tl.cumsum(total, axis=0)"),
        OpFault("(row < receive)", "(row <= receive)"),
        OpFault("counted = tl.maximum(counted, 0)", "counted += 0"),
        OpFault("place // PER_RANK", "place % PER_RANK"),
        OpFault("tl.sum(total, axis=0) - receive", "tl.sum(total, axis=0) + 1 - receive"),
        OpFault("number - tl.load(group_start + place", "number - 0 * tl.load(group_start + place"),
    ),
    "exchange.kernels.addresses": (
        OpFault("tl.load(table + owner", "tl.load(table + 0 * owner"),
        OpFault("(owner >= 0)", "(owner >= 1)"),
        OpFault("& (row >= 0)", "& (row >= 1)"),
    ),
    "exchange.kernels.push": (
        OpFault("tokens * TOP_K + first + k", "tokens * TOP_K + first"),
        OpFault("some = inside & (first + k < TOP_K)", "some = inside"),
        OpFault("groups[None, :], scale, mask=mask", "groups[None, :], scale, mask=mask & (k > 0)"),
        OpFault("codes = codes_of(value, scale", "codes = codes_of(value, 2.0 * scale"),
        OpFault("(slots << 32) | rank", "(slots << 32)"),
        OpFault("weight, mask=present", "weight + 1.0, mask=present"),
        OpFault("rank * size", "0 * rank"),
        OpFault("tl.load(sources + 2 * row + 1", "tl.load(sources + 2 * row"),
        OpFault("tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)", "num_rows"),
        OpFault("range(tl.program_id(0), tl.cdiv", "range(tl.program_id(0) + 1, tl.cdiv"),
    ),
    "exchange.kernels.direct": (
        OpFault("(turn & 1) * num_ranks + rank) * (HEADER", "(turn & 1) * num_ranks) * (HEADER"),
        OpFault("tl.store(turns, turn + 1)", "tl.store(turns, turn + 2)"),
        OpFault("tl.where(owner == peer, place - peer * PER_RANK, -1)", "place - peer * PER_RANK"),
        OpFault("(owner == peer).to(tl.int32)", "(owner >= peer).to(tl.int32)"),
        OpFault("tl.where(kept != 0, place, -1)", "tl.where(kept == 0, place, -1)"),
        OpFault("unused = pointer_to(tl.load(ids_at + peer)", "unused = pointer_to(tl.load(ids_at + rank)"),
        OpFault("wrong += invalid", "wrong += 0 * invalid"),
        OpFault("turn = tl.load(headers + 2 * other) - 1", "turn = tl.load(headers + 2 * other)"),
        OpFault("(tl.load(agree) == 0)", "(tl.load(agree) != 0)"),
        OpFault("lost = lost & (tl.load(wanted + slots", "lost = lost | (tl.load(wanted + slots"),
    ),
    "exchange.kernels.results": (
        OpFault("tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)", "num_rows"),
        OpFault("+ slot * ROW_BYTES", "+ slot"),
        OpFault("(slot < num_slots)", "(slot <= num_slots)"),
    ),
    "exchange.kernels.take": (
        OpFault("tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)", "num_rows"),
        OpFault("(columns // GROUP)", "(columns // (2 * GROUP))"),
        OpFault("* scale)", "* 1.0)"),
        OpFault("(source >= 0)", "(source >= 1)"),
    ),
    "exchange.kernels.pull": (
        OpFault("tl.load(pointers, mask=present, other=0.0,", "tl.load(pointers, mask=present, other=1.0,"),
    ),
    "common.kernels.dot": (OpFault("rest = values - high.to(tl.float32)", "rest = values * 0.0"),),
    "routing.kernels.backward": (
        OpFault("tl.where(total == 0.0, 0.0, tl.div_rn(values, total))", "tl.div_rn(values, total)"),
        OpFault('return expert_scores(-x, "sigmoid")', 'return expert_scores(x, "sigmoid")'),
        OpFault("2.0 * softplus", "softplus"),
        OpFault("mask=stored, other=0.0) * SCALE", "mask=stored, other=0.0)"),
        OpFault("placed = centred(shares(values, EPSILON), gradient)", "placed = shares(values, EPSILON) * gradient"),
        OpFault("total += EPSILON", "total += 0.0"),
        OpFault("result *= LOGIT_SCALE", "result *= 1.0"),
        OpFault("result * softcap_slope(raw * LOGIT_SCALE, SOFTCAP)", "result"),
        OpFault("probability * (result - tl.sum(values * gradient, axis=1)[:, None])", "probability * result"),
        OpFault("count * TOP_K", "count"),
        OpFault("(largest + tl.log(total))", "tl.log(total)"),
        OpFault("tl.where(kept[:, None], result, 0.0)", "result + 1e-3"),
        OpFault("count = tl.load(token_count)", "count = 1 + tl.load(token_count)"),
    ),
    "routing.kernels.topk": (
        OpFault("divisor += router.EPSILON", "divisor += 0.0"),
        OpFault("x = softcap(x, SOFTCAP)", "x = x + 0.0"),
        OpFault("x = x * LOGIT_SCALE", "x = x + 0.0"),
        OpFault("if SOFTMAX_LAST or router.BIAS_ON_LOGITS:", "if SOFTMAX_LAST:"),
        OpFault("router.GROUPS, PAIRS)", "router.GROUPS, False)"),
        OpFault("tl.where(slots < TOP_K, values, scores_of_others)", "values"),
        OpFault("row_sum(tl.where(slots < TOP_K, values, 0.0))", "row_sum(tl.where(slots < WIDTH, values, 0.0))"),
        OpFault('picked = tl.where(slots < TOP_K, picked, float("-inf"))', "picked = picked"),
    ),
    "norm.kernels.norm": (
        OpFault("result = value * factor * factors * SCALE", "result = value * factor * factors"),
        OpFault("partial += value * value", "partial = value * value"),
        OpFault("tl.sum(partial, axis=1), WIDTH * 1.0) + EPSILON", "tl.sum(partial, axis=1), WIDTH * 1.0)"),
        OpFault("value * (factor * factor * mean)", "value * (factor * mean)"),
        OpFault("along += gradient * factors * SCALE * value", "along += gradient * SCALE * value"),
        OpFault("gradient * (value * factor) * SCALE, mask", "gradient * value * SCALE, mask"),
        OpFault("factors += 1.0", "factors += 0.0"),
        OpFault("result = value * factors * factor * SCALE", "result = value * factor * SCALE"),
        OpFault("tl.store(products + here, d_z * value", "tl.store(products + here, gradient * value"),
    ),
    "exchange.kernels.send_tables": (
        OpFault("(columns > k) & (owner == one)", "(columns > k) & (owner == one + 1)"),
        OpFault("(first_token + rows + columns) %", "(first_token + rows) %"),
        OpFault("chosen = tl.where(kept != 0, chosen, -1)", "chosen = tl.where(kept == 0, chosen, -1)"),
        OpFault("tl.where(travels, number, number - 1)", "number"),
        OpFault("fits = arrives & (result < back)", "fits = arrives"),
        OpFault("arrives = arrives & (number < limit)", "arrives = arrives & (number <= limit)"),
        OpFault("mask=travels & (number == limit)", "mask=travels & (number < 0)"),
        OpFault("tl.maximum(arrived - back, 0) + over", "tl.maximum(arrived - back, 0)"),
        OpFault("result_start = tl.load(limits + num_ranks + ranks", "result_start = tl.load(limits + ranks"),
        OpFault("tl.where(blocks < block, one, 0)", "tl.where(blocks <= block, one, 0)"),
        OpFault("group_start -= tl.gather(owner_start, of_group, 0)", "group_start -= 0"),
        OpFault("tl.where(ranks < rank, own, 0)", "own"),
    ),
    "exchange.kernels.receive_tables": (
        OpFault("ids = place - rank * PER_RANK", "ids = place - rank * (PER_RANK - 1)"),
        OpFault("tl.where(here, weights, 0.0)", "weights"),
        OpFault("(gone > 0) | other", "gone > 0"),
        OpFault("placed = (local >= 0) & (number < most)", "placed = (local >= 0) & (number <= most - 2)"),
        OpFault("before += tl.where(blocks < block, slots, 0)", "before += slots * 0"),
        OpFault("tl.where(number < first, 0, -own)", "-own"),
        OpFault("number.to(tl.int64) * row_bytes", "number.to(tl.int64) * 4"),
    ),
    "routing.kernels.rounding": (
        OpFault("more = rest > 0", "more = rest > 1"),
        OpFault("(2 * rest > TILE) |", "(2 * rest >= TILE) |"),
        OpFault("(whole % 2 == 1)", "(whole % 2 == 0)"),
        OpFault("rows > candidates, whole * TILE, rows", "rows > candidates, rows, rows"),
        OpFault("slots % WIDTH >= TOP_K, values", "slots % WIDTH > TOP_K, values"),
        OpFault("^ 0x80000000", "^ 0"),
        OpFault("other=0) < 0)", "other=0) < -1)"),
        OpFault("wanted = tl.where(cut_extra, target - chosen, target)", "wanted = target"),
        OpFault("(ahead >> 8 == threshold)", "(ahead >> 8 >= threshold)"),
        OpFault("(above < wanted)", "(above <= wanted)"),
        OpFault("wanted -= tl.sum(tl.where(here, above, 0), axis=0)", "wanted -= 0"),
        OpFault("(rank < wanted)", "(rank <= wanted)"),
        OpFault("rank = ties + tl.cumsum(tie, axis=0) - tie", "rank = tl.cumsum(tie, axis=0) - tie"),
        OpFault("& some\n", "\n"),
        OpFault("| (inside & cut_extra & (extra == 0))", ""),
        OpFault("tl.where(kept, values, 0.0)", "values"),
        OpFault("gradient = tl.load(d_weights + slots, mask=kept", "gradient = tl.load(d_weights + slots, mask=inside"),
        OpFault("place = token * (WIDTH - TOP_K) + column - TOP_K", "place = token * (WIDTH - TOP_K)"),
    ),
    "routing.kernels.runs": (
        OpFault("+ tl.cumsum(kept, axis=0) - kept", "+ tl.sum(kept, axis=0)[None, :] - tl.cumsum(kept, axis=0)"),
        OpFault("tl.full((BLOCK,), 0, tl.int32) + expert,", "tl.full((BLOCK,), 0, tl.int32),"),
        OpFault("(run_row + offsets).to(tl.int32)", "(run_row + 0 * offsets).to(tl.int32)"),
        OpFault("(run_first + offsets).to(tl.int32)", "(run_first + 0 * offsets).to(tl.int32)"),
        OpFault("tl.minimum(missing, 2147483647)", "tl.minimum(missing + 1, 2147483647)"),
        OpFault("group_start + NUM_EXPERTS, filled", "group_start + NUM_EXPERTS, (filled + 1)"),
        OpFault("fill(slot_of_row, filled + program * BLOCK, num_rows", "fill(slot_of_row, filled, filled"),
        OpFault("fill(ids, end + expert.to(tl.int64) * BLOCK, last", "fill(ids, end, end"),
        OpFault("fill(row_of_slot, end + expert.to(tl.int64) * BLOCK, last", "fill(row_of_slot, end, end"),
    ),
    "lora.kernels.groups": (
        OpFault("tl.where(rank > 0, adapter + 1, 0)", "tl.where(rank > 0, 1, 0)"),
        OpFault("counted & (adapter != -1)", "counted"),
        OpFault("place = place + (merged.SLOTS + 1)", "place = place + 0"),
        OpFault("total[None, :] + tl.cumsum", "tl.cumsum"),
        OpFault("mask=(local >= 0) & (slots < block)", "mask=local >= 0"),
    ),
    "lora.kernels.dropout": (
        OpFault(">= THRESHOLD", "< THRESHOLD"),
        OpFault("* 0x85EBCA77 + SALT", "* 0x85EBCA77"),
    ),
    "lora.kernels.factors": (
        OpFault("adapter * NUM_EXPERTS + expert) * KEPT", "expert) * KEPT"),
        OpFault("tl.minimum(rank, RANK)", "RANK"),
        OpFault("group = expert * (SLOTS + 1) + 1 + adapter", "group = expert * (SLOTS + 1) + adapter"),
        OpFault("a = (a.to(tl.float32) * weight[:, None]).to(a.dtype)", "a = a"),
    ),
    "lora.kernels.tail": (
        OpFault("group = expert * (tail.SLOTS + 1) + 1 + adapter", "group = expert * (tail.SLOTS + 1) + adapter"),
        OpFault("tail.ranks + adapter * tail.NUM_EXPERTS + expert", "tail.ranks + expert"),
        OpFault("mine = exists & (rows >= first) & (rows < end)", "mine = exists"),
        OpFault('total = tl.where(spoiled, float("nan"), part)', "total = part"),
        OpFault("other=2147483647) <= high_row", "other=2147483647) < high_row"),
    ),
}
#: By kernel file: the tests of which one must fail.
TESTS = {
    "activation.kernels.formulas": "tests/ops/activation",
    "activation.kernels.backward": "tests/ops/activation/test_backward.py",
    "reduction.kernels.rowwise": "tests/ops/reduction/test_rowwise.py",
    "matmul.portable.weight_gradient_kernel": "tests/ops/matmul/test_weight_gradient.py",
    "matmul.portable.kernel": "tests/ops/matmul/test_weight_gradient.py",
    "common.kernels.dot": "tests/ops/matmul/test_weight_gradient.py",
    "common.kernels.rows": "tests/ops/matmul/test_weight_gradient.py",
    "routing.kernels.backward": "tests/ops/routing/test_backward.py",
    "routing.kernels.topk": "tests/ops/routing/test_topk.py",
    "norm.kernels.norm": "tests/ops/norm/test_norm.py",
    "routing.kernels.runs": "tests/ops/routing/test_runs.py",
    "routing.kernels.rounding": "tests/ops/routing/test_rounding.py",
    "routing.kernels.groups": "tests/ops/matmul/test_grouped.py",
    "exchange.kernels.send_tables": "tests/ops/exchange/test_send_tables.py",
    "exchange.kernels.receive_tables": "tests/ops/exchange/test_receive_tables.py",
    "exchange.kernels.places": "tests/ops/exchange/test_places.py",
    "exchange.kernels.addresses": "tests/ops/exchange/test_exchange.py",
    "exchange.kernels.push": "tests/ops/exchange/test_exchange.py",
    "exchange.kernels.direct": "tests/ops/exchange/test_direct.py",
    "exchange.kernels.results": "tests/torch/parallel/peer/test_experts_push.py::test_addresses_of_results",
    "exchange.kernels.take": "tests/ops/exchange/test_take.py",
    "exchange.kernels.pull": "tests/ops/exchange/test_exchange.py",
    **{f"lora.kernels.{name}": "tests/ops/lora" for name in ("groups", "dropout", "factors", "tail")},
}


class _OnCopies:
    """Runs the collected tests once per folder, each time in a fork."""

    def __init__(self, control: Path, folders: list[Path]) -> None:
        self._control, self._folders = control, folders

    @staticmethod
    def pytest_collection() -> None:
        """That a drawn example fails is enough; making it smaller takes a hundred times as long. Chosen after
        conftest.py chose its profile and before the tests, which take the one of that moment."""
        from hypothesis import Phase, settings

        settings.register_profile("faults", settings.get_profile("moebius"), phases=[Phase.generate])
        settings.load_profile("faults")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In the place of pytest's own loop. What every fork imports and is no kernel is imported before."""
        for name in INTERPRETER:
            importlib.import_module(name)
        assert session.items, "no test was collected"
        # The first case of every test, then the second: most faults fail all cases of a test. The costliest, hundreds
        # of experts, come last: few faults need them.
        cases: Counter[str] = Counter()
        ranked = []
        for item in session.items:
            test = item.nodeid.partition("[")[0]
            ranked.append(("many_experts" in item.name, cases[test], item))
            cases[test] += 1
        items = [item for *_, item in sorted(ranked, key=lambda entry: entry[:2])]
        failed: set[str] = set()
        for folder in self._folders:
            # What has failed before finds the next fault soon, too.
            items.sort(key=lambda item: item.nodeid not in failed)
            run_on_copy(folder, lambda folder=folder: _run_until_one_fails(session, items, folder))
            if (folder / "failed").exists():
                failed.add((folder / "failed").read_text())
        found = [item for item in items if item.nodeid in failed]
        run_on_copy(self._control, lambda: _run_until_one_fails(session, found, self._control))
        return True

    @staticmethod
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Forks end before pytest would show what failed."""
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}")


def _run_until_one_fails(session: pytest.Session, items: list[pytest.Item], folder: Path) -> int:
    for item in items:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            (folder / "failed").write_text(item.nodeid)
            return int(pytest.ExitCode.TESTS_FAILED)
    return int(pytest.ExitCode.OK)


if __name__ == "__main__":
    control, *folders = map(Path, sys.argv[2:])
    plugin = _OnCopies(control, folders)
    # Without capturing, what the forks print lies in their logs.
    sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", sys.argv[1]], plugins=[plugin]))
