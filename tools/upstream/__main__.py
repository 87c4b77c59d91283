"""Run other people's code on ours: `python -m tools.upstream` (vLLM), or with `triton-tests`, `maxtext` or `torchtitan`
behind it."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

#: Settings of a process whose kernels are interpreted; vLLM's files must then see no GPU.
_ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
#: The status where files of others are missing.
UNAVAILABLE = 69


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("vllm", "triton-tests", "maxtext", "torchtitan"), default="vllm")
    parser.add_argument(
        "--wheel",
        type=pathlib.Path,
        help="the wheel of vLLM, MaxText or torchtitan; else it is downloaded once (336, 14, 1 MB)",
    )
    parser.add_argument("--source", type=pathlib.Path, help="the folder python/triton_kernels of Triton")
    parser.add_argument("--generation", choices=("3.5", "3.8"), default="3.5", help="of triton-tests")
    parser.add_argument("--engine", choices=("cuda", "interpreter", "reference"), help="only on this one")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--traces", action="store_true", help="show where failures were raised")
    arguments = parser.parse_args()
    from tools.upstream.published import Missing

    try:
        if arguments.what == "triton-tests":
            from tools.upstream.triton_tests import run_tests

            return run_tests(arguments.source, arguments.only, arguments.generation)
        if arguments.what == "maxtext":
            return _maxtext(arguments.wheel)
        if arguments.engine is None:
            # Kernels are either compiled or interpreted in a process.
            return max(_engine(name) for name in _engines())
        wanted = {"TRITON_INTERPRET": "0"} if arguments.engine == "cuda" else _ON_CPU
        if any(os.environ.get(name, "0") != value for name, value in wanted.items()):
            os.execve(sys.executable, [sys.executable, "-m", "tools.upstream", *sys.argv[1:]], {**os.environ, **wanted})
        return _torchtitan(arguments) if arguments.what == "torchtitan" else _vllm(arguments)
    except Missing as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE


def _vllm(arguments: argparse.Namespace) -> int:
    from tools.upstream.published import vllm_files

    files = vllm_files(arguments.wheel)
    from tools.upstream import adapt_cases, object_cases, oracle_cases, recipe_cases, vllm_cases
    from tools.upstream.refusals import VLLM
    from tools.upstream.running import run_cases, table

    modules = (vllm_cases, object_cases, recipe_cases, adapt_cases, oracle_cases)
    cases = [case for module in modules for case in module.cases()]
    chosen = [case for case in cases if arguments.only in case.name]
    results = run_cases(chosen, arguments.engine, files, VLLM)
    if arguments.traces:
        for result in results:
            print(result.trace)
    print(table(results))
    return int(any(result.failed for result in results))


def _torchtitan(arguments: argparse.Namespace) -> int:
    """torchtitan's experts with their one method replaced."""
    from tools.upstream.published import torchtitan_files
    from tools.upstream.torchtitan import check

    problems = check(torchtitan_files(arguments.wheel), arguments.engine)
    for problem in problems:
        print(problem)
    return int(bool(problems))


def _maxtext(wheel: pathlib.Path | None) -> int:
    """MaxText's configs on 8 host devices, and its sparse layer with ragged_dot replaced."""
    from tools.upstream.published import maxtext_files

    package = maxtext_files(wheel)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    from tools.upstream.maxtext import check
    from tools.upstream.maxtext_moe import check_layer

    problems = [*check(package), *check_layer(package)]
    for problem in problems:
        print(problem)
    return int(bool(problems))


def _engines() -> list[str]:
    import torch

    return [*(["cuda"] if torch.cuda.is_available() else []), "reference", "interpreter"]


def _engine(name: str) -> int:
    command = [sys.executable, "-m", "tools.upstream", *sys.argv[1:], "--engine", name]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
