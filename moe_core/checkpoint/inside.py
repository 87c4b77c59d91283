"""Which files a checkpoint may consist of: those in its directory, and those that a link of its cache leads to.

A checkpoint from a stranger may name any file of the machine: by a link, by `../`, by an absolute name. Reading one
would copy it into what is written next. So all files lie in the directory itself, links resolved. Hugging Face's cache
is the exception, for it consists of links: `models--x/snapshots/<revision>/` leads to `models--x/blobs/`.
"""

from __future__ import annotations

from pathlib import Path

from moe_core.errors import InvalidInput


def require_relative(name: str, index: Path) -> None:
    """Raise InvalidInput unless a file name of an index stays below the index's directory, links aside."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > 255:
        raise InvalidInput(
            f"weight_map in {index} must name files in the directory of the index, got {name!r:.200}; "
            "put the files there, or download the checkpoint again"
        )


def inside(directory: Path, name: str) -> Path:
    """`directory`/`name`; InvalidInput if it is a link that leads out of the checkpoint."""
    path = directory / name
    try:
        root, target = directory.resolve(), path.resolve()
        if any(target.is_relative_to(allowed) for allowed in (root, *_blobs(root))):
            return path
    except (OSError, RuntimeError) as error:
        # Names that are too long, and links that lead to each other.
        raise InvalidInput(f"{path!s:.400} must be a readable file, got: {error!s:.400}; correct the name") from error
    raise InvalidInput(
        f"{path} must lie in the checkpoint's directory, or in the blobs of Hugging Face's cache, got a link to "
        f"{target}; pass the directory that holds the files, or copy them"
    )


def _blobs(root: Path) -> list[Path]:
    """The blobs of the repository that `root` is a snapshot of, or a folder in a snapshot of."""
    folders = (root, *root.parents)
    return [folder.parent.parent / "blobs" for folder in folders if folder.parent.name == "snapshots"]
