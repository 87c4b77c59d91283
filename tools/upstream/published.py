"""Where the files of others are: the wheels of engines, MaxText, Tunix and torchtitan, fetched once, and the tests of
`triton_kernels`.

They stay below `build/`, which git ignores.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import zipfile

from tools.environment import CPU_TRANSFORMERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "upstream"
VLLM, MAXTEXT, TORCHTITAN, TUNIX, MEGATRON = "0.33.0", "0.2.5", "0.3.0", "0.1.7", "0.16.1"
#: The commit of TensorRT-LLM's repository.
TENSORRT_LLM = "00131d71"
#: By engine, the release that must run beside the newest one.
PINNED = {"vllm": VLLM, "sglang": "0.5.23", "transformers": CPU_TRANSFORMERS.partition("==")[2]}
#: What is unpacked of the wheels, by the beginning of the path.
_WANTED = {
    "vllm": (
        "vllm/model_executor/layers/fused_moe/",
        "vllm/model_executor/layers/quantization/utils/",
        "vllm/third_party/triton_kernels/",
        "vllm/utils/math_utils.py",
        "vllm/scalar_type.py",
    ),
    "sglang": tuple(
        f"sglang/srt/layers/moe/{name}.py"
        for name in ("topk", "fused_moe_triton/triton_kernels_moe", "moe_runner/triton_kernels")
    ),
    "transformers": ("transformers/",),
    "torchtitan": ("torchtitan/models/", "torchtitan/ops/"),
    # The second is absent from folders that earlier versions unpacked.
    "maxtext": ("maxtext/", "maxtext/trainers/"),
    "google_tunix": ("tunix/",),
    "megatron_core": ("megatron/core/",),
}
#: By generation, the folder `python/triton_kernels` of the Triton repository with its tests, and the tag.
TRITON_KERNELS = {"3.5": (CACHE / "triton_kernels", "v3.5.1"), "3.8": (CACHE / "triton_kernels_38", "v3.8.0")}
_TENSORRT_LLM = "tensorrt_llm/_torch/modules/fused_moe/fused_moe_triton.py"


class Missing(Exception):
    """Files of others are not there, and how to get them."""


def vllm_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package `vllm` of the wheel: a given one, or that of the package index."""
    return _unpacked("vllm", VLLM, wheel)


def releases(name: str) -> list[str]:
    """The pinned release of an engine, and the newest one on the package index."""
    return list(dict.fromkeys([PINNED[name], _version(name, _fetch(name, name))]))


def engine_files(name: str, version: str, wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds an engine's package of a release, as far as it is run."""
    return _unpacked(name, version, wheel)


def tensorrt_llm_files(source: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package of the repository. Raises Missing, which says how to get it."""
    folder = source or CACHE / "tensorrt_llm"
    if not (folder / _TENSORRT_LLM).exists():
        raise Missing(
            f"{folder} must hold {_TENSORRT_LLM} of github.com/NVIDIA/TensorRT-LLM at commit {TENSORRT_LLM}; copy it "
            "there, or name the folder with --source. The package index has a stub alone, which downloads elsewhere"
        )
    return folder


def local_vllm_files() -> pathlib.Path | None:
    """`vllm_files` without a download; None where they are absent."""
    wheels, folder = sorted(CACHE.glob(f"vllm-{VLLM}-*.whl")), CACHE / f"vllm-{VLLM}" / "unpacked"
    return vllm_files() if wheels or folder.exists() else None


def maxtext_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder `maxtext` of MaxText's wheel."""
    return _unpacked("maxtext", MAXTEXT, wheel) / "maxtext"


def tunix_files() -> pathlib.Path:
    """The folder `tunix` of Tunix's wheel."""
    return _unpacked("google_tunix", TUNIX, None) / "tunix"


def torchtitan_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package `torchtitan` of its wheel, with the sources of its models."""
    return _unpacked("torchtitan", TORCHTITAN, wheel)


def megatron_files(wheel: pathlib.Path | None = None) -> pathlib.Path:
    """The folder that holds the package `megatron` of megatron-core's wheel."""
    return _unpacked("megatron_core", MEGATRON, wheel)


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
    found = sorted(CACHE.glob(f"{name}-{version}-*.whl"))
    return found[0] if found else _fetch(name, f"{name}=={version}")


def _fetch(name: str, requirement: str) -> pathlib.Path:
    """The wheel that pip chooses. It downloads none that is there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    # Only read, never installed: any platform's wheel has the same Python files.
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 34)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(CACHE), "--only-binary=:all:"]
    done = subprocess.run(
        [*command, *platforms, "--python-version=3.12", requirement], check=False, capture_output=True, text=True
    )
    wheels = re.findall(rf"{name}-[^\s/]+\.whl", done.stdout)
    if done.returncode or not wheels:
        print(done.stderr, file=sys.stderr)
        raise Missing(f"{requirement} could not be downloaded; pass its wheel with --wheel PATH")
    return CACHE / wheels[-1]


def _version(name: str, wheel: pathlib.Path) -> str:
    return wheel.name.removeprefix(f"{name}-").partition("-")[0]


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
