"""Where the files of others are: the wheels of vLLM, MaxText and torchtitan, fetched once, and the tests of
`triton_kernels`.

They stay below `build/`, which git ignores.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "upstream"
VLLM, MAXTEXT, TORCHTITAN = "0.33.0", "0.2.5", "0.3.0"
#: What is unpacked of the wheels, by the beginning of the path.
_WANTED = {
    "vllm": (
        "vllm/model_executor/layers/fused_moe/",
        "vllm/model_executor/layers/quantization/utils/",
        "vllm/third_party/triton_kernels/",
        "vllm/utils/math_utils.py",
        "vllm/scalar_type.py",
    ),
    "torchtitan": ("torchtitan/models/", "torchtitan/ops/"),
    "maxtext": (
        "maxtext/configs/base.yml",
        "maxtext/configs/custom_mesh_and_rule/",
        "maxtext/layers/",
        "maxtext/common/common_types.py",
        "maxtext/utils/sharding.py",
    ),
}
#: By generation, the folder `python/triton_kernels` of the Triton repository with its tests, and the tag.
TRITON_KERNELS = {"3.5": (CACHE / "triton_kernels", "v3.5.1"), "3.8": (CACHE / "triton_kernels_38", "v3.8.0")}


class Missing(Exception):
    """Files of others are not there, and how to get them."""


def vllm_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package `vllm` of the wheel: a given one, or that of the package index."""
    return _unpacked("vllm", VLLM, wheel)


def local_vllm_files() -> pathlib.Path | None:
    """`vllm_files` without a download; None where they are absent."""
    wheels, folder = sorted(CACHE.glob(f"vllm-{VLLM}-*.whl")), CACHE / f"vllm-{VLLM}" / "unpacked"
    return vllm_files() if wheels or folder.exists() else None


def maxtext_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder `maxtext` of MaxText's wheel, with its configs and the sources of its layers."""
    return _unpacked("maxtext", MAXTEXT, wheel) / "maxtext"


def torchtitan_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package `torchtitan` of its wheel, with the sources of its models."""
    return _unpacked("torchtitan", TORCHTITAN, wheel)


def _unpacked(name: str, version: str, wheel: pathlib.Path | None) -> pathlib.Path:
    folder = CACHE / f"{name}-{version}"
    done = folder / "unpacked"
    if wheel is None and done.exists() and all((folder / wanted).exists() for wanted in _WANTED[name]):
        return folder
    with zipfile.ZipFile(wheel or _downloaded(name, version)) as archive:
        for member in archive.namelist():
            if member.startswith(_WANTED[name]) and member.endswith((".py", ".yml")):
                archive.extract(member, folder)
    done.touch()
    return folder


def _downloaded(name: str, version: str) -> pathlib.Path:
    def found() -> list[pathlib.Path]:
        return sorted(CACHE.glob(f"{name}-{version}-*.whl"))

    if not found():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Only read, never installed: any platform's wheel has the same Python files.
        platform = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(CACHE), *platform]
        status = subprocess.run([*command, f"{name}=={version}"], check=False).returncode
        if status or not found():
            raise Missing(f"{name}=={version} could not be downloaded; pass its wheel with --wheel PATH")
    return found()[0]


def triton_kernels_files(source: pathlib.Path | None = None, generation: str = "3.5") -> pathlib.Path:
    """The folder with upstream's `triton_kernels` and `tests`. Raises Missing, which says how to get it."""
    kept, tag = TRITON_KERNELS[generation]
    folder = source or kept
    if not (folder / "tests" / "test_matmul.py").exists() or not (folder / "triton_kernels").is_dir():
        raise Missing(
            f"{kept} must hold the folder python/triton_kernels of github.com/triton-lang/triton at tag {tag}, with "
            "triton_kernels/ and tests/ in it; copy it there, or name it with --source"
        )
    return folder
