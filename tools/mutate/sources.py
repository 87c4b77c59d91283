"""The files that are mutated, by folder, and mutations as pieces of text in them."""

from __future__ import annotations

import ast
import pathlib
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Test support inside the packages, code that only a GPU runs, and that of a library which only `make upstream` has.
LEFT_OUT = ("moe_core/parity/", "moe_torch/parity/", "moe_jax/parity", "moe_core/tools/", "moe_core/runtime/")
LEFT_OUT += ("moe_torch/torchtitan.py",)


def is_kernel(path: str) -> bool:
    parts = pathlib.PurePosixPath(path)
    return path.startswith("moe_core/ops/") and (parts.parent.name == "kernels" or parts.stem.endswith("kernel"))


def needs_gpu(source: str) -> bool:
    """Whether a kernel file is written in Gluon, which no interpreter runs."""
    return "triton.experimental" in source


def folder_of(path: str) -> str | None:
    """The folder under a package, of all packages that have one of this name: `layers`, `ops/routing`; `.` is none."""
    if path.startswith(LEFT_OUT) or path.endswith("__init__.py"):
        return None
    _, *folders, _ = path.split("/")
    return "/".join(folders[: 2 if folders[:1] == ["ops"] else 1]) or "."


def files(root: pathlib.Path, paths: tuple[str, ...], gpu: bool) -> dict[str, list[str]]:
    """Folder -> files, relative to root; `paths`: only what begins with one of these, all where empty."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.glob("moe_*/**/*.py")):
        name = path.relative_to(root).as_posix()
        folder = folder_of(name)
        if folder is None or (paths and not name.startswith(paths)):
            continue
        if gpu or not (is_kernel(name) and needs_gpu(path.read_text())):
            found.setdefault(folder, []).append(name)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Mutation:
    """`source[start:end]`, in bytes of the file, becomes `new`.

    function: its qualified name, `<module>` outside. entry: the key, where it lies in an entry of a table.
    """

    path: str
    function: str
    operator: str
    line: int
    start: int
    end: int
    new: str
    entry: str = ""

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def texts(self, source: str) -> tuple[str, str]:
        """The lines that the mutation touches, as they are and as they become, with blanks made one."""
        data = source.encode()
        begin = data.rfind(b"\n", 0, self.start) + 1
        finish = data.find(b"\n", self.end)
        finish = len(data) if finish < 0 else finish
        after = data[begin : self.start] + self.new.encode() + data[self.end : finish]
        return " ".join(data[begin:finish].decode().split()), " ".join(after.decode().split())

    @property
    def key(self) -> str:
        return f"{self.path}:{self.start}:{self.end}:{self.operator}:{self.new}"


class Source:
    """A parsed file: texts of nodes, their parents and the functions around them."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text)
        self.data = text.encode()
        self.lines = [0]
        for line in self.data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.arg))
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def function(self, node: ast.AST) -> str:
        """The qualified name, as code objects have it, of the innermost function around a node."""
        names: list[str] = []
        inside = False
        while node in self.parents:
            child, node = node, self.parents[node]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if child in node.decorator_list:
                    continue
                names = [node.name, *(["<locals>"] if names else []), *names]
                inside = True
            elif isinstance(node, ast.ClassDef) and inside:
                names = [node.name, *names]
        return ".".join(names) if inside else "<module>"

    def entry(self, node: ast.AST) -> str:
        """The outermost key, a text, whose value in a dictionary holds a node."""
        found = ""
        while node in self.parents:
            child, node = node, self.parents[node]
            if isinstance(node, ast.Dict) and child in node.values:
                key = node.keys[node.values.index(child)]  # type: ignore[arg-type]
                found = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else found
        return found

    def in_kernel(self, node: ast.AST) -> bool:
        """Whether Triton compiles the function around a node."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef):
                return any(ast.unparse(decorator).endswith((".jit", ".jit()")) for decorator in node.decorator_list)
        return False
