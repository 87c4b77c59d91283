"""The files that a checkpoint may consist of: those in its directory, and targets of links in Hugging Face's cache.

A stranger's checkpoint may name any file by a link, `../` or an absolute name, and reading one would copy it into the
next output. Hugging Face's cache links `models--x/snapshots/<revision>/` to `models--x/blobs/`.
"""

from __future__ import annotations

from pathlib import Path

from moe_core.errors import InvalidInput


def require_relative(name: str, index: Path) -> None:
    """Raise InvalidInput unless a file name stays below the index's directory, links aside."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > 255:
        raise InvalidInput(
            f"weight_map in {index} must name files in the directory of the index, got {name!r:.200}; "
            "put the files there, or download the checkpoint again"
        )


def inside(directory: Path, name: str) -> Path:
    """`directory`/`name`. Raises InvalidInput for a link that leads out of the checkpoint."""
    path = directory / name
    try:
        root, target = directory.resolve(), path.resolve()
        if any(target.is_relative_to(allowed) for allowed in (root, *_blobs(root))):
            return path
    except (OSError, RuntimeError) as error:
        # Names that are too long, and circular links.
        raise InvalidInput(f"{path!s:.400} must be a readable file, got: {error!s:.400}; correct the name") from error
    raise InvalidInput(
        f"{path} must lie in the checkpoint's directory, or in the blobs of Hugging Face's cache, got a link to "
        f"{target}; pass the directory that holds the files, or copy them"
    )


def _blobs(root: Path) -> list[Path]:
    """The blobs of the repository with `root` as or in a snapshot."""
    folders = (root, *root.parents)
    return [folder.parent.parent / "blobs" for folder in folders if folder.parent.name == "snapshots"]
