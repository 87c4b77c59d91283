"""Commands: reports that are opened before the work, and exit statuses."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from moe_core.base.files import path_of, whole_file
from moe_core.errors import InvalidInput, Unsupported

#: Of every command. 1 says that results differ, and nothing else.
COULD_NOT_RUN = 2


def require_writable(name: str, path: str | os.PathLike[str]) -> None:
    """Raise InvalidInput unless a file can be written there, which this leaves as it is."""
    target = path_of(path, name)
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a directory")
        if target.exists() and not target.is_file():
            return  # a device or pipe
        probe = target.with_name(f"{target.name}.{os.getpid()}.partial")
        with probe.open("xb"):
            pass
        probe.unlink()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name} must be a path to write to, got {path!s:.400} ({error}); name another") from error


def report_writer(path: str | None, made: str | None = None) -> Callable[[str], None]:
    """A function that writes the text of `--json`: nowhere for None, to stdout for `-`. made: a directory to make."""
    if path is None:
        return lambda text: None
    if path == "-":
        return print
    if made is None or not path_of(path).resolve().is_relative_to(path_of(made).resolve()):
        require_writable("--json", path)

    def write(text: str) -> None:
        with whole_file(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    return write


def run(name: str, command: Callable[[], int]) -> int:
    """Return the command's exit status, or COULD_NOT_RUN after an error."""
    try:
        return command()
    except (InvalidInput, Unsupported, OSError) as problem:
        print(f"{name}: could not run: {problem}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return COULD_NOT_RUN
