"""Run other people's code on ours: `python -m tools.upstream ENGINE`, `triton-tests`, `maxtext`, `torchtitan` or
`megatron`."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from tools.upstream.published import PINNED, Missing, releases

#: Settings of a process whose kernels are interpreted; vLLM's files must then see no GPU.
_ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
ENGINES = ("vllm", "sglang", "transformers", "tensorrt-llm")
#: The status where files of others are missing.
UNAVAILABLE = 69


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream", description=__doc__)
    whats = (*ENGINES, "engines", "triton-tests", "maxtext", "torchtitan", "megatron")
    parser.add_argument("what", nargs="?", choices=whats, default="vllm", help="engines: each of the first four")
    parser.add_argument("--wheel", type=pathlib.Path, help="the wheel; else it is downloaded once (1 to 336 MB)")
    parser.add_argument("--release", help="of an engine; else the pinned one and the newest of the package index")
    parser.add_argument(
        "--source", type=pathlib.Path, help="the folder python/triton_kernels of Triton, or TensorRT-LLM's repository"
    )
    parser.add_argument("--generation", choices=("3.5", "3.8"), default="3.5", help="of triton-tests")
    parser.add_argument("--engine", choices=("cuda", "interpreter", "reference"), help="only on this one")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--share", default="0/1", help="I/N: every Nth case from I on, for N processes side by side")
    parser.add_argument("--traces", action="store_true", help="show where failures were raised")
    parser.add_argument("--write", action="store_true", help="of engines: write the table into the page")
    parser.add_argument("--record", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.what == "engines":
            return _engines(arguments)
        if arguments.what == "triton-tests":
            from tools.upstream.triton_tests import run_tests

            run_tests(arguments.source, arguments.only, arguments.generation, arguments.share)
        if arguments.what == "maxtext":
            return _maxtext(arguments.wheel, arguments.engine == "cuda")
        if arguments.what == "megatron":
            from tools.upstream.megatron import check
            from tools.upstream.published import megatron_files

            return _told(check(megatron_files(arguments.wheel)))
        if arguments.what in PINNED and arguments.release is None:
            named = None if arguments.wheel is None else [arguments.wheel.name.split("-")[1]]
            return max(_again("--release", one) for one in named or releases(arguments.what))
        if arguments.engine is None:
            # Kernels are either compiled or interpreted in a process.
            return max(_again("--engine", name) for name in _runs_on())
        wanted = {"TRITON_INTERPRET": "0"} if arguments.engine == "cuda" else _ON_CPU
        if any(os.environ.get(name, "0") != value for name, value in wanted.items()):
            os.execve(sys.executable, [sys.executable, "-m", "tools.upstream", *sys.argv[1:]], {**os.environ, **wanted})
        return _torchtitan(arguments) if arguments.what == "torchtitan" else _engine(arguments)
    except Missing as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE


def _engines(arguments: argparse.Namespace) -> int:
    """Every engine, and the table of what ran. TensorRT-LLM's files may be absent: no package index has them."""
    from tools.upstream import engines

    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "rows"
        record.touch()
        statuses = {name: _again("--record", str(record), what=name) for name in ENGINES}
        text = engines.render(engines.recorded(record))
    print(text)
    if arguments.write:
        engines.write(text)
    return max(status for name, status in statuses.items() if not (name == "tensorrt-llm" and status == UNAVAILABLE))


def _engine(arguments: argparse.Namespace) -> int:
    from tools.upstream.engines import run
    from tools.upstream.running import table

    results = run(arguments)
    if arguments.traces:
        for result in results:
            print(result.trace)
    print(f"{arguments.what} {arguments.release or ''}\n{table(results)}")
    return int(any(result.failed for result in results))


def _torchtitan(arguments: argparse.Namespace) -> int:
    """torchtitan's experts with their one method replaced."""
    from tools.upstream.published import torchtitan_files
    from tools.upstream.torchtitan import check

    files = torchtitan_files(arguments.wheel)
    problems = check(files, arguments.engine)
    if arguments.engine == "reference":
        from tools.upstream.torchtitan_ranks import check_ranks

        problems += check_ranks(files)
    return _told(problems)


def _told(problems: list[str]) -> int:
    for problem in problems:
        print(problem)
    return int(bool(problems))


def _maxtext(wheel: pathlib.Path | None, on_gpu: bool) -> int:
    """MaxText's and Tunix's trainers on 8 host devices, and MaxText's layer with ragged_dot. on_gpu: that layer."""
    from tools.upstream.published import maxtext_files, tunix_files

    package = maxtext_files(wheel)
    if not on_gpu:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
        # XLA compiles a step for much longer than it runs.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    from tools.upstream.maxtext import check
    from tools.upstream.maxtext_moe import check_layer, check_models
    from tools.upstream.maxtext_train import check_training
    from tools.upstream.tunix import check_tunix

    problems = []
    if not on_gpu:
        problems += [*check(package), *check_models(package, fsdp=2, expert=2), *check_training(package)]
        problems += check_tunix(tunix_files())
    return _told([*problems, *check_layer(package), *check_models(package)])


def _runs_on() -> list[str]:
    import torch

    return [*(["cuda"] if torch.cuda.is_available() else []), "reference", "interpreter"]


def _again(option: str, value: str, what: str | None = None) -> int:
    """This command in another process, with one option more. what: instead of `engines`."""
    rest = [what if argument == "engines" else argument for argument in sys.argv[1:] if argument != "--write"]
    command = [sys.executable, "-m", "tools.upstream", *rest, option, value]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
