"""The operators. Each looks at one node of a file and yields texts to put in the place of nodes.

Left alone are annotations, imports, decorators, docstrings and the insides of error messages, whose text is not a
behaviour, and arguments that change the speed alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from tools.mutate.sources import Mutation, Source

#: What an operator yields: the node that is replaced, and the new text.
Change = tuple[ast.AST, str]
Operator = Callable[[ast.AST, Source], Iterator[Change]]

COMPARISONS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
ARITHMETIC = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"},
    **{ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "|"},
}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.Pow)
#: Pairs of functions that are easily taken for each other.
TWINS = {
    **{"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "floor": "ceil", "zeros": "ones"},
    **{"zeros_like": "ones_like", "cumsum": "cumprod", "sum": "max", "startswith": "endswith"},
}
TWINS |= {other: one for one, other in TWINS.items() if one != "sum"}
#: Arguments that change no result: how fast, what people read, and `strict` of zip, which asserts as `assert` does.
SPEED = (
    *("cache_modifier", "eviction_policy", "num_warps", "num_stages", "sem", "scope", "volatile"),
    *("stacklevel", "doc", "help", "label", "message", "strict"),
)
#: Where a program or a tile is: `bound` moves what they give, and other arguments of theirs are errors.
PLACES = ("arange", "program_id")
WAITS = ("wait", "barrier", "arrive", "fence", "join", "expect", "launch_dependents", "commit")
CASTS = ("to", "astype", "type", "float", "double", "view")


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def compare(node: ast.AST, source: Source) -> Iterator[Change]:
    """`<` for `<=`, `==` for `!=`, `is` for `is not`, `in` for `not in`, and back."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = source.of(node.left), source.of(node.comparators[0])
        yield node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"


def arithmetic(node: ast.AST, source: Source) -> Iterator[Change]:
    """Another arithmetic operator. Unions of types are no arithmetic."""
    if isinstance(node, ast.BinOp) and (sign := ARITHMETIC.get(type(node.op))):
        sides = (node.left, node.right)
        kinds = any((isinstance(s, ast.Constant) and s.value is None) or source.of(s)[:1].isupper() for s in sides)
        if any(isinstance(s, (ast.JoinedStr, ast.List)) or source.of(s)[:1] in "\"'" for s in sides):
            return
        if not (isinstance(node.op, ast.BitOr) and (kinds or source.of(node.left) in ("int", "str", "float"))):
            yield node, f"({source.of(node.left)} {sign} {source.of(node.right)})"


def swap(node: ast.AST, source: Source) -> Iterator[Change]:
    """The operands of `-`, `/`, `//`, `%` and `@`, or the first two arguments of a call, change places."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED) and source.of(node.left)[:1] not in "f\"'":
        left, right = source.span(node.left), source.span(node.right)
        sign = source.data[left[1] : right[0]].decode()
        if "(" not in sign and ")" not in sign:
            yield node, f"({source.of(node.right)}{sign}({source.of(node.left)}))"
    if (
        isinstance(node, ast.Call)
        and len(node.args) >= 2
        and name_of(node.func) not in (*TWINS, "isinstance", "arange")
    ):
        first, second = (1, 2) if name_of(node.func) == "where" and len(node.args) == 3 else (0, 1)
        one, two = node.args[first], node.args[second]
        if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred) and ast.dump(one) != ast.dump(two):
            whole, begin, end = source.span(node)[0], source.span(one), source.span(two)
            between = source.data[begin[1] : end[0]].decode()
            rest = source.data[end[1] : source.span(node)[1]].decode()
            head = source.data[whole : begin[0]].decode()
            yield node, f"{head}{source.of(two)}{between}{source.of(one)}{rest}"


def number(node: ast.AST, source: Source) -> Iterator[Change]:
    """An integer one more and one less, a float doubled or 1 for 0, and the other truth value."""
    parent = source.parents.get(node)
    if not isinstance(node, ast.Constant) or (isinstance(parent, ast.Call) and name_of(parent.func) in PLACES):
        return
    if isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node.value, int):
        around = source.parents.get(parent) if isinstance(parent, ast.UnaryOp) else None
        # Every negative size of `reshape` is the one that is left.
        if not (isinstance(around, ast.Call) and name_of(around.func) == "reshape"):
            yield node, str(node.value + 1)
        yield node, f"({node.value - 1})"
    elif isinstance(node.value, float):
        yield node, "1.0" if node.value == 0 else f"({source.of(node)} * 2)"


def logic(node: ast.AST, source: Source) -> Iterator[Change]:
    """`and` for `or` and back, one operand less, no `not`."""
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(f'({source.of(value)})' for value in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({source.of(node.operand)})"


def condition(node: ast.AST, source: Source) -> Iterator[Change]:
    """The condition of an `if`, a `while`, an `if` expression or a comprehension is negated."""
    tests: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.IfExp)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if "TYPE_CHECKING" not in source.of(test):
            yield test, f"(not ({source.of(test)}))"


def twin(node: ast.AST, source: Source) -> Iterator[Change]:
    """min for max, any for all, floor for ceil, zeros for ones, and back."""
    if isinstance(node, ast.Call) and name_of(node.func) in TWINS:
        yield node.func, source.of(node.func)[: -len(name_of(node.func))] + TWINS[name_of(node.func)]


def drop_raise(node: ast.AST, source: Source) -> Iterator[Change]:
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield node, "pass"


def drop_statement(node: ast.AST, source: Source) -> Iterator[Change]:
    """A call made for its effect, an augmented assignment, or an assignment to an item, is gone."""
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    item = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    if call or item or isinstance(node, ast.AugAssign):
        yield node, "pass"


def drop_argument(node: ast.AST, source: Source) -> Iterator[Change]:
    """A keyword argument less: the default in its place."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in SPEED and keyword.arg not in ("mask", "other", "default"):
                yield without(node, source, keyword.arg)


def without(node: ast.Call, source: Source, *names: str) -> Change:
    kept = [source.of(argument) for argument in node.args]
    kept += [source.of(keyword) for keyword in node.keywords if keyword.arg not in names]
    return node, f"{source.of(node.func)}({', '.join(kept)})"


def early_return(node: ast.AST, source: Source) -> Iterator[Change]:
    """`continue` for `break`, and back; a function's value that is lost; a branch that no longer returns early."""
    if isinstance(node, ast.Continue | ast.Break):
        yield node, "break" if isinstance(node, ast.Continue) else "continue"
    elif isinstance(node, ast.Return):
        above = source.parents[node]
        if isinstance(above, ast.If) and not isinstance(node.value, ast.Constant) and above.orelse == []:
            yield node, "pass"
        elif node.value is not None and source.of(node.value) != "None" and not source.in_kernel(node):
            yield node, "return None"


def default(node: ast.AST, source: Source) -> Iterator[Change]:
    """Another default of a parameter or of a dataclass's field: the other truth value, one more, another word."""
    values: list[ast.expr | None] = []
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        values = [*node.args.defaults, *node.args.kw_defaults]
    elif isinstance(node, ast.AnnAssign) and isinstance(source.parents[node], ast.ClassDef):
        values = [node.value]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
            yield value, repr(value.value + "x")


def axis(node: ast.AST, source: Source) -> Iterator[Change]:
    """Another axis: of a keyword, of a shape, or of a transpose that does not happen."""
    if (
        isinstance(node, ast.keyword)
        and node.arg in ("axis", "dim")
        and isinstance(node.value, (ast.Constant, ast.UnaryOp))
    ):
        yield node.value, {"0": "1", "1": "0", "-1": "-2", "-2": "-1"}.get(source.of(node.value), "0")
    elif (
        isinstance(node, ast.Subscript)
        and name_of(node.value) in ("shape", "strides")
        and source.of(node.slice) in "012"
    ):
        yield node.slice, {"0": "1", "1": "0", "2": "1"}[source.of(node.slice)]
    elif isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        yield node, source.of(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        turned = node.func.attr in ("swapaxes", "transpose", "permute")
        if turned and source.of(node.func.value) not in ("np", "jnp", "torch"):
            yield node, source.of(node.func.value)


def drop_cast(node: ast.AST, source: Source) -> Iterator[Change]:
    """A conversion less: `.to(tl.int64)`, `.astype(...)`, `tl.cast(x, ...)`, `np.float32(x)`, `int(x)`. A store casts
    to the type of its pointer anyway."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return
    if node.args and source.of(node.args[-1]).endswith(".dtype.element_ty"):
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        yield node, source.of(node.func.value)
    elif name_of(node.func) in ("cast", "int", "float", "float32", "float64", "int64", "int32", "ascontiguousarray"):
        yield node, f"({source.of(node.args[0])})" if node.args else source.of(node)


def mask(node: ast.AST, source: Source) -> Iterator[Change]:
    """A load or store without its mask, with the opposite one, or with one condition less."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in ("load", "store", "atomic_add"):
        return
    for keyword in node.keywords:
        if keyword.arg == "mask":
            yield without(node, source, "mask", "other")
            yield keyword.value, f"~({source.of(keyword.value)})"
            if isinstance(keyword.value, ast.BinOp) and isinstance(keyword.value.op, ast.BitAnd):
                yield keyword.value, f"({source.of(keyword.value.left)})"
                yield keyword.value, f"({source.of(keyword.value.right)})"


def other(node: ast.AST, source: Source) -> Iterator[Change]:
    """What masked elements read as."""
    if isinstance(node, ast.keyword) and node.arg == "other":
        text = source.of(node.value)
        yield node.value, "1.0" if text == "0.0" or "inf" in text else f"({text} + 1)"


def loop_order(node: ast.AST, source: Source) -> Iterator[Change]:
    """A loop that runs from its end to its beginning: the order of a sum."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in ("range", "static_range") or node.keywords:
        return
    texts = [f"({source.of(argument)})" for argument in node.args]
    start, stop, step = {1: ["0", *texts, "1"], 2: [*texts, "1"], 3: texts}[len(texts)]
    last = f"{start} + ({stop} - {start} + {step} - 1) // {step} * {step} - {step}"
    yield node, f"{source.of(node.func)}({last}, {start} - {step}, -{step})"


def drop_wait(node: ast.AST, source: Source) -> Iterator[Change]:
    """A barrier, a wait, or another step of an order between threads, is gone."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and any(word in name_of(call.func) for word in WAITS):
        yield node, "pass"


def bound(node: ast.AST, source: Source) -> Iterator[Change]:
    """An offset one too far: where programs and tiles begin."""
    if isinstance(node, ast.Call) and name_of(node.func) in PLACES:
        yield node, f"({source.of(node)} + 1)"


PYTHON: tuple[Operator, ...] = (
    *(compare, arithmetic, swap, number, logic, condition, twin, drop_raise, drop_statement, drop_argument),
    *(early_return, default, axis, drop_cast),
)
TRITON: tuple[Operator, ...] = (
    *(mask, other, loop_order, drop_wait, bound, drop_cast),
    *(compare, arithmetic, swap, number, logic, condition, twin, drop_statement, early_return, axis),
)
PASSED_OVER = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert, ast.Global)


def nodes(source: Source) -> Iterator[ast.AST]:
    """The nodes that operators see, in the order of the text."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, PASSED_OVER) or (isinstance(node, ast.keyword) and node.arg in SPEED):
            return
        yield node
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(source.tree)


def mutations(source: Source) -> list[Mutation]:
    """Every mutation of a file, each once, in the order of the text; a few are no Python, see `parses`."""
    found: dict[tuple[int, int, str], Mutation] = {}
    for node in nodes(source):
        kernel = source.in_kernel(node)
        for operator in TRITON if kernel else PYTHON:
            for target, new in operator(node, source):
                start, end = source.span(target)
                if new == source.of(target) or ('f"' in new and operator is swap):
                    continue
                line = source.data.count(b"\n", 0, start) + 1
                name = operator.__name__
                place = (source.path, source.function(node), name, line, start, end, new)
                mutation = Mutation(*place, source.entry(node))
                found.setdefault((start, end, new), mutation)
    return sorted(found.values(), key=lambda mutation: (mutation.start, mutation.end, mutation.new))


def parses(mutation: Mutation, source: str) -> bool:
    try:
        ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return True
