"""Each operator of tools/mutate on a small sample, the names of functions, and the list of equivalent mutations."""

from __future__ import annotations

import itertools
import textwrap

import pytest

from tools.mutate import equivalent
from tools.mutate.operators import PYTHON, TRITON, mutations
from tools.mutate.sources import ROOT, Source, files

#: Operator -> a line, and what it becomes.
PYTHON_SAMPLES = {
    "compare": [("return a < b", "return (a <= b)"), ("return a is b", "return (a is not b)")],
    "arithmetic": [("return a + b", "return (a - b)"), ("return a // b", "return (a * b)")],
    "swap": [("return a - b", "return (b - (a))"), ("return f(a, b)", "return f(b, a)")],
    "number": [("return a[1]", "return a[2]"), ("return a[1]", "return a[(0)]"), ("return f(True)", "return f(False)")],
    "logic": [("return a and b", "return ((a) or (b))"), ("return not a", "return (a)")],
    "condition": [("return a if b else c", "return a if (not (b)) else c")],
    "twin": [("return max(a, b)", "return min(a, b)"), ("return np.any(a)", "return np.all(a)")],
    "drop_raise": [("raise ValueError(a)", "pass")],
    "drop_statement": [("a.append(b)", "pass"), ("a += b", "pass"), ("a[b] = c", "pass")],
    "drop_argument": [("return f(a, key=b)", "return f(a)")],
    "early_return": [("return f(a)", "return None")],
    "axis": [
        ("return a.sum(axis=0)", "return a.sum(axis=1)"),
        ("return a.shape[0]", "return a.shape[1]"),
        ("return a.T", "return a"),
        ("return a.swapaxes(b, c)", "return a"),
    ],
    "drop_cast": [("return a.astype(b)", "return a"), ("return np.float32(a)", "return (a)")],
}
TRITON_SAMPLES = {
    "mask": [
        ("x = tl.load(p, mask=m & n, other=0)", "x = tl.load(p)"),
        ("x = tl.load(p, mask=m & n, other=0)", "x = tl.load(p, mask=~(m & n), other=0)"),
        ("x = tl.load(p, mask=m & n, other=0)", "x = tl.load(p, mask=(m), other=0)"),
    ],
    "other": [("x = tl.load(p, mask=m, other=0.0)", "x = tl.load(p, mask=m, other=1.0)")],
    "loop_order": [("for k in range(n): f(k)", "for k in range(0 + ((n) - 0 + 1 - 1) // 1 * 1 - 1, 0 - 1, -1): f(k)")],
    "drop_wait": [("tl.debug_barrier()", "pass"), ("mbarrier.wait(b, 0)", "pass")],
    "bound": [("x = tl.arange(0, B)", "x = (tl.arange(0, B) + 1)")],
    "drop_cast": [("x = rows.to(tl.int64)", "x = rows"), ("x = tl.cast(a, tl.float32)", "x = (a)")],
    "compare": [("x = rows < n", "x = (rows <= n)")],
    "twin": [("x = tl.minimum(a, b)", "x = tl.maximum(a, b)")],
    "swap": [("x = tl.where(c, a, b)", "x = tl.where(c, b, a)")],
}


def made(line: str, kernel: bool = False) -> list[tuple[str, str]]:
    """(operator, the line as it becomes) of every mutation of a function that holds one line."""
    head = "@triton.jit\ndef function(p):\n" if kernel else "def function(a, b, c):\n"
    source = Source("sample.py", head + textwrap.indent(line, "    "))
    return [(mutation.operator, mutation.texts(source.text)[1]) for mutation in mutations(source)]


@pytest.mark.parametrize("operator", list(PYTHON_SAMPLES))
def test_an_operator_for_python(operator: str) -> None:
    for line, becomes in PYTHON_SAMPLES[operator]:
        assert (operator, becomes) in made(line)


@pytest.mark.parametrize("operator", list(TRITON_SAMPLES))
def test_an_operator_for_kernels(operator: str) -> None:
    for line, becomes in TRITON_SAMPLES[operator]:
        assert (operator, becomes) in made(line, kernel=True)


def test_every_operator_has_a_sample() -> None:
    assert {operator.__name__ for operator in PYTHON} == {*PYTHON_SAMPLES, "default"}
    assert {operator.__name__ for operator in TRITON} <= {*PYTHON_SAMPLES, *TRITON_SAMPLES}


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("arguments", ["{}", "3, 3 + {}", "1, 1 + {}, 3", "2, 2 + {}, 2"])
def test_a_turned_loop_has_the_same_steps(count: int, arguments: str) -> None:
    call = f"range({arguments.format(count)})"
    turned = [text for operator, text in made(f"for k in {call}: f(k)", kernel=True) if operator == "loop_order"]
    assert list(eval(turned[0].removeprefix("for k in ").removesuffix(": f(k)"))) == list(eval(call))[::-1]


def test_texts_annotations_and_speed_are_left_alone() -> None:
    for line in (
        "'a docstring'",
        "x: dict[int, 3] = a",
        "raise ValueError(f'{1 + 2} {a - b}')",
        "import x.y",
        "assert a == 1, b",
        "for x in zip(a, strict=True): pass",
    ):
        assert [operator for operator, _ in made(line) if operator != "drop_raise"] == []
    assert made("x = tl.load(p, eviction_policy=f(1), cache_modifier=g(2))", kernel=True) == []


def test_what_changes_nothing_is_left_alone() -> None:
    """Negative sizes, casts to the type that a store casts to, and infinity plus 1."""
    assert [text for operator, text in made("a.reshape(-1)") if operator == "number"] == ["a.reshape(-(0))"]
    assert made("y = x.to(p.dtype.element_ty)", kernel=True) == []
    assert ("other", "x = tl.load(p, mask=m, other=1.0)") in made(
        'x = tl.load(p, mask=m, other=-float("inf"))', kernel=True
    )


def test_functions_are_named_as_code_objects_are() -> None:
    text = "class A:\n    x = 1 < 2\n    def f(self):\n        def g():\n            return 1 < 2\n        return g\n"
    space: dict[str, type] = {}
    exec(text, space)
    names = [mutation.function for mutation in mutations(Source("a.py", text)) if mutation.operator == "compare"]
    assert names == ["<module>", space["A"].f(None).__code__.co_qualname]  # type: ignore[attr-defined]


def test_every_file_of_the_folders_parses_and_is_mutated() -> None:
    found = files(ROOT, ("moe_core/ops/reduction", "moe_core/plan", "moe_jax/quantize"), gpu=False)
    assert set(found) == {".", "ops/reduction", "plan"}
    for name in itertools.chain.from_iterable(found.values()):
        text = (ROOT / name).read_text()
        for mutation in mutations(Source(name, text)):
            assert mutation.apply(text) != text and mutation.line >= 1


def test_listed_mutations_are_still_in_the_sources_and_have_reasons() -> None:
    entries = equivalent.load()
    assert all(len(entry.why) > 20 for entry in entries)
    assert len({entry.key for entry in entries}) == len(entries)
    assert not equivalent.outdated(entries), "sources changed: take these out of tools/mutate/equivalent.toml"
