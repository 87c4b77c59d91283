"""The pages of the API reference: one for each public module, and one for what both front-ends share."""
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import griffe

#: Public module -> what it is for. `moe_torch` and `moe_jax` export the specs of `moe_core`, which have a page.
MODULES = {
    "moe_torch": "Layers and ops on torch tensors",
    "moe_torch.trace": "Routing traces in torch",
    "moe_torch.transformers": "The experts of transformers models",
    "moe_torch.parallel": "Expert parallelism in torch",
    "moe_torch.modular": "The modular kernel in torch",
    "moe_torch.modular.vllm": "Experts inside vLLM's own kernel",
    "moe_jax": "Ops on JAX arrays",
    "moe_jax.nnx": "Flax NNX layers",
    "moe_jax.linen": "Flax Linen layers",
    "moe_jax.layers": "Layers as functions of parameters, and the specs of layers",
    "moe_jax.trace": "Routing traces in JAX",
    "moe_jax.parallel": "Expert parallelism in JAX",
    "moe_jax.modular": "The modular kernel in JAX",
    "moe_core.checkpoint": "Hugging Face and MaxText checkpoints",
    "moe_core.formats": "Quantised formats",
    "moe_core.parity": "Comparing implementations",
}
SHARED = "api/shared.md"


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
    found = {}
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
        found[f"api/{name}.md"] = "\n\n".join(
            [*text, "## Members", *(own[path] for path in sorted(own, key=shown_first))]
        )
    blocks = [f"::: {public}\n" for _, public in sorted(shared.items(), key=lambda entry: shown_first(entry[0]))]
    intro = "What both front-ends take and return: import these names from `moe_torch`, `moe_jax` or their modules."
    found[SHARED] = "\n\n".join(["# Shared specs and data", intro, *blocks])
    rows = [f"| [{name}]({name}.md) | {title} |" for name, title in MODULES.items()]
    rows.append(f"| [shared]({Path(SHARED).name}) | Specs, operands, results and errors of both front-ends |")
    table = "\n".join(["| module | what it holds |", "|---|---|", *rows])
    intro = "For readers who know what they look for. The pages are made of the docstrings. A short way to a layer:"
    example = "```python\nimport torch\nfrom moe_torch import MoE\n\ny = MoE(64, 96, 8, 2)(torch.randn(4, 64))\n```"
    found["api/index.md"] = "\n\n".join(["# API reference", intro, example, table])
    return found
