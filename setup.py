"""What pyproject.toml cannot say: where the project is published, and the README with links that lead there.

The build of a release sets MOEBIUS_REPOSITORY to the address of the repository, and MOEBIUS_REVISION to the tag. The
package index then shows the README with absolute links, and how to install from it. Without an address, as in a build
at home, links to files of the repository become their names, so that none leads nowhere.
"""

from __future__ import annotations

import os
import pathlib
import re

README = pathlib.Path(__file__).parent / "README.md"
#: A picture, and a link, whose target is a file of the repository.
_IMAGE = re.compile(r"!\[([^\[\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")
_SOURCE = re.compile(r'\b(src|srcset|href)="(?!\w+:|#)([^"]+)"')
_PICTURE = re.compile(r"<picture>.*?</picture>\n?|<img [^>]*>\n?", re.DOTALL)


#: What pages say before a release, as a pattern, and what they say in one; {} is the repository's address.
_RELEASED = (
    (
        r"From the checkout, with (Python [\d.]+ or newer); \*\*`moebius`\*\* is not on the package index yet\.",
        r"With \1.",
    ),
    (r" It is not on the\s+package index yet, so install it from a checkout,", r" Install it"),
    (r"# from a checkout; or", "# or"),
    (r"pip install '\.\[", "pip install 'moebius["),
    (r"Set `MOEBIUS_REPOSITORY` to this repository's address\. ", ""),
    (r'"\$MOEBIUS_REPOSITORY"', "{}"),
    (r"^(!\[Python\]\()", r"[![CI]({0}/actions/workflows/ci.yml/badge.svg)]({0}/actions/workflows/ci.yml) \1"),
)


def released(page: str, repository: str) -> str:
    """A page as a release shows it: installed from the package index, with badges of the repository."""
    for pattern, text in _RELEASED:
        page = re.sub(pattern, text.replace("{0}", repository).replace("{}", repository), page, flags=re.MULTILINE)
    return page


def published(readme: str, repository: str | None, revision: str) -> str:
    """The README as the package index shows it."""
    if repository is None:
        readme = _IMAGE.sub("", _PICTURE.sub("", readme))
        return _LINK.sub(lambda link: link[1], readme)
    readme = released(readme, repository)
    here, raw = f"{repository}/blob/{revision}", f"{repository}/raw/{revision}"
    readme = _IMAGE.sub(lambda image: f"![{image[1]}]({raw}/{image[2]})", readme)
    readme = _LINK.sub(lambda link: f"[{link[1]}]({here}/{link[2]})", readme)
    return _SOURCE.sub(lambda source: f'{source[1]}="{here if source[1] == "href" else raw}/{source[2]}"', readme)


def urls(repository: str | None) -> dict[str, str]:
    """The addresses of the project, as far as they are known."""
    if repository is None:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


if __name__ == "__main__":
    from setuptools import setup

    place = os.environ.get("MOEBIUS_REPOSITORY") or None
    setup(
        long_description=published(README.read_text("utf-8"), place, os.environ.get("MOEBIUS_REVISION") or "main"),
        long_description_content_type="text/markdown",
        project_urls=urls(place),
    )
