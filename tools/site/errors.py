"""The page of errors: every message of `InvalidInput` and `Unsupported`, read out of the source.

A message stands there with its placeholders, and its fix is what follows its last semicolon. The anchor of an entry is
made of its text, so that a link stays right until the text changes.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import html
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("moe_core", "moe_torch", "moe_jax")
KINDS = ("InvalidInput", "Unsupported")
#: Subject -> how modules of its messages begin; the first that fits counts.
SUBJECTS = {
    "Expert parallelism": r"\w+(\.(modular|layers|transformers))?\.parallel|.*\.(exchange|sharded|placed|shards)\b",
    "Checkpoints": r"moe_core\.checkpoint|\w+\.safetensors",
    "vLLM": r"\w+\.modular\.vllm",
    "Names of triton_kernels": r"\w+\.compat",
    "The modular kernel": r"\w+\.modular",
    "transformers": r"moe_torch\.transformers",
    "Quantised formats": r"moe_core\.formats|\w+(\.ops)?\.(quantize|prepack)|.*\.quantized",
    "Routing": r"\w+\.ops\.(routing|router)|.*\.(routing|router|rounding)\b",
    "Products and activations": r"\w+\.(ops\.(matmul|activation|reduction|norm)|grouped)",
    "Layers": r"\w+\.(layers|nnx|linen|ops\.moe|specs\.moe)",
    "Training": r"\w+\.(autograd|autodiff)|.*\.backward",
    "Parity, traces and tools": r"\w+\.(parity|trace|view|tools|compare)",
    "Kernels and their tuning": r"\w+\.(plan|runtime|tuning|launcher|warmup|prepare|specs\.(tuning|tile_table))",
    "Arguments of every op": r"",
}


@dataclasses.dataclass(frozen=True)
class Message:
    """text: with placeholders in braces. names: of a check's parameter, the arguments that it is called for.
    is_reason: it stands inside a message of `Unsupported`, and in what `explain` prints."""

    kind: str
    text: str
    module: str
    names: tuple[str, ...] = ()
    is_reason: bool = False

    @property
    def anchor(self) -> str:
        return f"e-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    @property
    def subject(self) -> str:
        return next(name for name, pattern in SUBJECTS.items() if re.match(pattern, self.module))


def template(node: ast.expr) -> str | None:
    """The text of an expression with placeholders; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _placeholder(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = template(node.left), template(node.right)
        return None if None in parts else "".join(map(str, parts))
    return None


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp) and (one := template(node.body)) is not None:
        other = template(node.orelse) or ""
        return f"{one}|{other}" if one and other else f"[{one or other}]"
    while not isinstance(node, (ast.Name, ast.Attribute)):
        inner = next((child for child in (*getattr(node, "args", ()), getattr(node, "value", None)) if child), None)
        if not isinstance(inner, ast.expr):
            return "{…}"
        node = inner
    return f"{{{node.id if isinstance(node, ast.Name) else node.attr}}}"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _functions(
    tree: ast.AST, around: ast.FunctionDef | None = None
) -> Iterator[tuple[ast.AST, ast.FunctionDef | None]]:
    """Every node with the function around it."""
    for node in ast.iter_child_nodes(tree):
        yield node, around
        yield from _functions(node, node if isinstance(node, ast.FunctionDef) else around)


def messages(root: Path) -> list[Message]:
    """All messages of the packages, each text once, in the order of modules."""
    raised: list[tuple[str, ast.expr, ast.FunctionDef | None, str]] = []
    returned: list[tuple[ast.FunctionDef, ast.expr, str]] = []
    calls: dict[str, list[ast.Call]] = {}
    defined: collections.Counter[str] = collections.Counter()
    sources: set[str] = set()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node, around in _functions(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                calls.setdefault(_name(node.func), []).append(node)
                if _name(node.func) in KINDS and node.args:
                    raised.append((_name(node.func), node.args[0], around, module))
            elif isinstance(node, ast.Return) and node.value is not None and around is not None:
                returned.append((around, node.value, module))
            if isinstance(node, ast.FunctionDef):
                defined[node.name] += 1
            if isinstance(node, ast.Assign | ast.NamedExpr) and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                sources |= {_name(node.value.func)} if _name(target) in ("reason", "prepared") else set()
    found: dict[str, Message] = {}

    def add(kind: str, text: str, module: str, names: tuple[str, ...] = (), is_reason: bool = False) -> None:
        found.setdefault(" ".join(text.split()), Message(kind, " ".join(text.split()), module, names, is_reason))

    calls = {name: made for name, made in calls.items() if defined[name] == 1}
    for kind, node, around, module in raised:
        text = template(node)
        if text is not None:
            add(kind, text, module, _names(around, text, calls))
    for around, value, module in returned:
        if around.name.startswith("why_") or around.name in sources:
            for node in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                text = template(node)
                if text and " " in text:
                    add("Unsupported", text, module, is_reason=True)
    return list(found.values())


def _names(around: ast.FunctionDef | None, text: str, calls: dict[str, list[ast.Call]]) -> tuple[str, ...]:
    """The constants that a check is called with for the parameter which its message begins with."""
    first = re.match(r"\{(\w+)\}", text)
    parameters = [one.arg for one in around.args.args] if around is not None else []
    if around is None or first is None or first[1] not in parameters:
        return ()
    place = parameters.index(first[1]) - (parameters[0] == "self")
    given = [call.args[place] for call in calls.get(around.name, []) if len(call.args) > place]
    return tuple(sorted({str(node.value) for node in given if isinstance(node, ast.Constant)}))


def entry(message: Message) -> str:
    """A message as HTML: what was expected as the heading, and its fix."""
    cause, _, fix = message.text.rpartition("; ")
    names = f", for {', '.join(message.names)}" if message.names else ""
    kind = "Unsupported and explain" if message.is_reason else message.kind
    cure = f"<b>Fix</b>: {html.escape(fix)}. " if cause else ""
    return (
        f'<div class="error"><h3 id="{message.anchor}"><a href="#{message.anchor}"><code>{html.escape(cause or fix)}'
        f"</code></a></h3><p>{cure}<small>{kind}, {message.module}{html.escape(names)}</small></p></div>"
    )


def page(root: Path) -> str:
    """The page of all messages by subject."""
    found = messages(root)
    parts = [
        "---\nhide: [navigation, toc]\n---\n# Errors",
        f"For everybody who met a message of Moebius: all {len(found)}, with their fixes. Braces stand for values.",
        '<label for="message">Paste your message or some words of it:</label>\n'
        '<textarea id="message" rows="2"></textarea>\n<p id="matches" role="status"></p>\n<div id="best"></div>',
        "[By symptom](user/troubleshooting.md), if there is no message.",
    ]
    for subject in SUBJECTS:
        own = [message for message in found if message.subject == subject]
        parts += [f"## {subject}", "\n".join(map(entry, own))] if own else []
    parts.append(f"<script>\n{(Path(__file__).parent / 'errors.js').read_text()}</script>")
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the messages that have most of the given words; 1 where none has half of them."""
    given = set(re.findall(r"\w+", " ".join(arguments).lower()))
    shares = [
        (len(given & set(re.findall(r"\w+", f"{one.text} {' '.join(one.names)}".lower()))) / max(len(given), 1), one)
        for one in messages(Path(__file__).resolve().parents[2])
    ]
    best = [one for share, one in sorted(shares, key=lambda pair: -pair[0])[:5] if share >= 0.5]
    print("\n".join(f"{one.kind}, {one.module}: {one.text}" for one in best) or "no such message")
    return int(not best)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
