"""The pages of the API reference: one for each public module, and one for what both front-ends share."""
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from pathlib import Path

import griffe

#: Public module -> what it is for. `moe_torch` and `moe_jax` export the specs of `moe_core`, which have a page.
MODULES = {
    "moe_torch": "Layers and ops on torch tensors",
    "moe_torch.trace": "Routing traces in torch",
    "moe_torch.monitor": "What routers do while a torch model trains",
    "moe_torch.lightning": "The monitor as a callback of Lightning",
    "moe_torch.peft": "PEFT's adapters of experts",
    "moe_torch.transformers": "The experts of transformers models",
    "moe_torch.parallel": "Expert parallelism in torch",
    "moe_torch.modular": "The modular kernel in torch",
    "moe_torch.modular.vllm": "Experts inside vLLM's own kernel",
    "moe_jax": "Ops on JAX arrays",
    "moe_jax.nnx": "Flax NNX layers",
    "moe_jax.linen": "Flax Linen layers",
    "moe_jax.layers": "Layers as functions of parameters, and the specs of layers",
    "moe_jax.trace": "Routing traces in JAX",
    "moe_jax.monitor": "What routers do while a JAX model trains",
    "moe_jax.parallel": "Expert parallelism in JAX",
    "moe_jax.modular": "The modular kernel in JAX",
    "moe_core.checkpoint": "Hugging Face and MaxText checkpoints, LoRA adapters",
    "moe_core.formats": "Quantised formats",
    "moe_core.parity": "Comparing implementations",
}
SHARED = "api/shared.md"
#: Part of the screen -> how the paths of its names look; the first that fits counts.
SCREEN = {
    "Several devices": r"\w+\.parallel\.|moe_\w+\.layers\.(parallel|listed|rebalance|placed|sharded|axes)",
    "Traces and monitors": r"moe_\w+\.(trace|monitor|lightning)\.|moe_jax\.layers\.observed",
    "transformers": r"moe_torch\.transformers",
    "Parity": r"moe_core\.parity",
    "Checkpoints": r"moe_core\.checkpoint",
    "Quantised experts": r"moe_core\.formats|moe_\w+\.quantize|moe_jax\.layers\.qwix",
    "Specs of layers": r"moe_core\.layers",
    "Layers": r"moe_torch\.layers|moe_jax\.(layers|nnx|linen)",
    "Ops": r"moe_\w+\.(ops|rows|grouped|launcher|warmup)",
    "Specs and operands of ops": r"moe_core\.specs",
    "Arrays, platforms, errors": r"",
}
#: In which order they stand there.
ORDER = ("Layers", "Ops", "Specs of layers", "Specs and operands of ops", *SCREEN)


def screen(names: dict[str, str]) -> str:
    """Every name as a link, by layer, op and spec. names: path -> name."""
    parts: dict[str, dict[str, list[str]]] = {}
    for path, name in names.items():
        part = next(part for part, pattern in SCREEN.items() if re.match(pattern, path))
        package = next((label for start, label in _LABELS.items() if path.startswith(start)), "")
        parts.setdefault(part, {}).setdefault(name, []).append(f"[{package or f'`{name}`'}][{path}]")
    cells = []
    for part in dict.fromkeys(ORDER):
        entries = [
            links[0] if links[0].startswith("[`") else f"`{name}` <small>{' '.join(links)}</small>"
            for name, links in sorted(parts.get(part, {}).items(), key=lambda one: one[0].lower())
        ]
        cells.append(f"<div markdown>\n\n## {part}\n\n{' · '.join(entries)}\n\n</div>")
    return "\n".join(['<div class="screen" markdown>', *cells, "</div>"])


_LABELS = {"moe_torch": "torch", "moe_jax.nnx": "NNX", "moe_jax.linen": "Linen", "moe_jax": "JAX"}
#: Of the ranks of `shown_first`.
_TITLES = ("## Layers", "## Layers", "## Ops", "## Ops", "## More")


def shown_first(path: str) -> tuple[int, str]:
    """Sort key of an object: layers, then ops, then everything else."""
    _, *inside, name = path.split(".")
    if name in ("MoE", "moe"):
        return 2 * (name == "moe"), name
    rank = 1 if "layers" in inside else 3 if {"ops", "rows"} & set(inside[:1]) else 4
    return rank, name.lower()


def exported(module: griffe.Module) -> list[str]:
    """The public names of a module: its `__all__`, or what it imports as the same name."""
    if module.exports is not None:
        return sorted({str(name) for name in module.exports} - {"__version__"}, key=str.lower)
    return [name for name, member in module.members.items() if member.is_alias and not name.startswith("_")]


def pages(root: Path) -> dict[str, str]:
    """Path of a page in the site -> its Markdown."""
    loader = griffe.GriffeLoader(search_paths=[root])
    packages = {name: loader.load(name) for name in ("moe_core", "moe_torch", "moe_jax")}
    loader.resolve_aliases(implicit=True, external=False)
    shared: dict[str, str] = {}
    # An object has one place, the module that is named first here; others link to it.
    seen: set[str] = set()
    found, on_screen = {}, {}
    for name in sorted(MODULES, key=lambda name: not name.startswith("moe_core")):
        package, _, inside = name.partition(".")
        module = packages[package][inside] if inside else packages[package]
        own: dict[str, str] = {}
        others, constants = [], []
        for member in exported(module):
            target = module[member]
            try:
                path = target.final_target.path if target.is_alias else target.path
            except griffe.AliasResolutionError:
                # A name that an assignment of several gives, such as the formats' constants.
                constants.append(f"`{member}`")
                continue
            if ".modular" not in name:
                on_screen.setdefault(path, member)
            if package != "moe_core" and path.startswith("moe_core.") and path not in seen:
                shared.setdefault(path, f"{name}.{member}")
            if path in seen or path in shared:
                others.append(f"[{member}][{path}]")
            else:
                seen.add(path)
                own[path] = f"::: {name}.{member}\n    options: {{heading_level: 3}}\n"
        text = [
            f"# {name}",
            f"{MODULES[name]}.",
            f"::: {name}\n    options: {{members: false, show_root_heading: false}}\n",
        ]
        text += [f"Shared with the other front-end, or of the core: {', '.join(others)}."] if others else []
        text += [f"Constants: {', '.join(constants)}."] if constants else []
        for path in sorted(own, key=shown_first):
            title = _TITLES[shown_first(path)[0]]
            text += [title] if title not in text else []
            text.append(own[path])
        found[f"api/{name}.md"] = "\n\n".join(text)
    blocks = [f"::: {public}\n" for _, public in sorted(shared.items(), key=lambda entry: shown_first(entry[0]))]
    intro = "What both front-ends take and return: import these names from `moe_torch`, `moe_jax` or their modules."
    found[SHARED] = "\n\n".join(["# Shared specs and data", intro, *blocks])
    rows = [f"| [{name}]({name}.md) | {title} |" for name, title in MODULES.items()]
    rows.append(f"| [shared]({Path(SHARED).name}) | Specs, operands, results and errors of both front-ends |")
    table = "\n".join(["| module | what it holds |", "|---|---|", *rows])
    intro = "All names on one screen, from layers over ops to specs. torch and JAX link to each front-end's page."
    head = "---\nhide: [navigation, toc]\n---\n# API"
    found["api/index.md"] = "\n\n".join([head, intro, screen(on_screen), "## Modules", table])
    return found
