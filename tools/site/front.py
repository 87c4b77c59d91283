"""The first page of the site: what it is, both layers, a proof and a figure, out of README.md."""

from __future__ import annotations

import re
import textwrap

WAYS = (
    ("Run a layer", "Install, and a first call in every framework.", "user/start.md"),
    ("Train", "In torch and Flax: gradients, memory, losses, LoRA.", "user/training.md"),
    ("Watch", "Load, entropy and dead experts while it trains.", "user/watch.md"),
    ("Port a model", "From torch to Flax, and a proof that both are equal.", "tutorials/port_to_flax.md"),
    ("Serve", "fp8, int8, int4 and mxfp4 experts, several GPUs.", "user/quantization.md"),
    ("Look inside", "Routing, parity and plans as pictures.", "user/view.md"),
    ("Choose", "Format, GPUs and parallelism of your model.", "user/choosing.md"),
    ("Find a name", "The API on one screen.", "api/index.md"),
    ("Cure an error", "Every message with its fix.", "errors.md"),
    ("Cure a symptom", "Slow, NaN, out of memory, hangs.", "user/troubleshooting.md"),
)


def _block(readme: str, title: str, language: str) -> str:
    """The first block of a section, without the line that names what it needs."""
    section = readme.partition(f"## {title}\n")[2] if title else readme
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None, f"README.md must have a block of {language} below {title!r}"
    return re.sub(r"\A# needs .*\n", "", found[1])


def _fenced(readme: str, title: str) -> str:
    return f"```python\n{_block(readme, title, 'python')}```"


def page(readme: str) -> str:
    """The page as Markdown."""
    pitch = readme.partition("\n\n")[2].partition("\n\n")[0]
    tabs = "\n".join(
        f'=== "{title}"\n\n{textwrap.indent(_fenced(readme, title), "    ")}\n' for title in ("torch", "Flax")
    )
    cards = "\n".join(f"-   **[{title}]({path})**\n\n    {text}\n" for title, text, path in WAYS)
    return f"""---
title: Moebius
hide: [navigation, toc]
---
<div class="front" markdown>
<img src="figures/logo.svg" alt="" width="150" height="112">
<div markdown>

# Moebius

{pitch}

[Start](user/start.md){{ .md-button .md-button--primary }} [Tutorial](tutorials/port_to_flax.md){{ .md-button }}

</div>
</div>

<div class="halves" markdown>
<div markdown>

{tabs}

**The same bits in both frameworks**, proved on your machine:

```text
{_block(readme, "", "text")}```

</div>
<div markdown>

![Time of other implementations over the time of Moebius](figures/speedup.svg)

</div>
</div>

<div class="grid cards" markdown>

{cards}
</div>
"""
