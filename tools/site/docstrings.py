"""The extension of griffe that gives docstrings their sections before the API reference is made of them."""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import griffe

from tools.site.links import ROOT
from tools.site.sections import LIKE, completed, with_sections


@functools.cache
def _torch() -> Any:
    """The torch front-end, with docstrings as they are written."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    package = loader.load("moe_torch")
    loader.resolve_aliases(implicit=True, external=False)
    return package


class Sections(griffe.Extension):
    """Rewrites the docstrings of functions and classes before they are parsed."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._rewrite(func, [one.name.lstrip("*") for one in func.parameters], "Args")

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = [name for name, member in cls.members.items() if member.is_attribute]
        start = cls.members.get("__init__")
        given: Iterable[Any] = start.parameters if isinstance(start, griffe.Function) else ()
        parameters = [one.name.lstrip("*") for one in given if one.name != "self"]
        self._rewrite(cls, parameters or fields, "Args" if parameters else "Attributes")
        if cls.docstring is not None and "NamedTuple" in map(str, cls.bases):  # griffe sees no parameters there
            cls.docstring.value = cls.docstring.value.replace("\nArgs:\n", "\nAttributes:\n")

    def _rewrite(self, subject: griffe.Function | griffe.Class, names: Sequence[str], title: str) -> None:
        if subject.docstring is None:
            return
        text = subject.docstring.value
        like = LIKE.search(text) if subject.path.startswith("moe_jax.") else None
        subject.docstring.value = with_sections(text, names, title)
        if like is not None:
            name = like[1].partition(".")[2]
            other = _torch()[name]
            other = other[name] if other.is_module else other  # such as `warmup`, which is in a module of its name
            full = with_sections(other.docstring.value, [one.name for one in other.parameters], title)
            subject.docstring.value = completed(subject.docstring.value, full)
