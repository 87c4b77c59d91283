"""Every kernel of representative plans compiles for sm_80 to sm_120 within the hardware's limits.

No GPU is needed: Triton compiles for an architecture it is told. This is where a spill, an overfull shared memory or a
matrix product that misses the tensor cores' fast path shows before any GPU runs it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

from moe_core.ops.exchange.direct import PUSH_TOKENS_ONCE
from moe_core.ops.matmul.portable.plan import MATMUL_OGS
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS
from moe_core.plan.steps import Constant, Kernel, KernelLaunch, passed
from tests.support.compile_gate.binaries import overwritten, resource_usage
from tests.support.compile_gate.cover import (
    ONLY,
    TUNED,
    code,
    cover,
    digest,
    everything,
    facts,
    fault_digests,
    sources,
    unrecorded,
    unrecorded_faults,
)
from tests.support.compile_gate.exchange_plans import narrow_moves
from tests.support.compile_gate.gate import GFX942, GROUPS, MODELS, Record
from tests.support.faults import pdl, sm90
from tests.support.faults.kernel_copies import KERNELS, OpFault, run_on_faulty_copies
from tests.support.paths import ROOT

#: What is compiled: `cover` by `make gate`, `all` by `make gate-all`, else by the suite a model for AMD alone.
EXTENT = os.environ.get("MOEBIUS_GATE", "suite")
assert EXTENT in ("suite", "cover", "all"), f"MOEBIUS_GATE must be suite, cover or all, got {EXTENT!r}"
ARCHS = ("80", "89", "90", "100", "120")
#: Minutes long: they begin first, so that no process waits for another's at the end.
LONG = ("prepared_tall", "prepared_integers", "prepared", "sm90_tall", "sm90_swapped")
NVIDIA = [
    (group, arch)
    for group in sorted(GROUPS, key=lambda group: group not in LONG)
    if group not in ("from_logits", "sm90")
    for arch in ARCHS
    if arch == ONLY.get(group, arch) and EXTENT == "all"
]
#: How many processes compile an architecture's cover, one after another where there are fewer cores.
PARTS = {"80": 3, "89": 3, "90": 6, "100": 3, "120": 3}
#: Whose covers: all of them, or what `make gate ARCHS=` names.
COVERED = os.environ.get("MOEBIUS_ARCHS", ",".join(PARTS)).split(",")
assert set(COVERED) <= set(PARTS), f"MOEBIUS_ARCHS must be of {','.join(PARTS)}, got {COVERED}"
not_in = {
    extent: pytest.mark.skipif(extent == EXTENT, reason=f"not compiled for MOEBIUS_GATE={extent}")
    for extent in ("suite", "cover", "all")
}
GOOD = Record(SM90_MATMUL_OGS.name, "label", "90", 4096, 8, 196608, 168, 0, True, True, True)


def compiled(cache: pathlib.Path, script: str, *arguments: str) -> list[Record]:
    """The records of a script of the gate, from a fresh process with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    inherited = environment.get("PYTHONPATH")
    paths = [str(ROOT), *([inherited] if inherited else [])]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", f"tests.support.compile_gate.{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [Record(**record) for record in json.loads(done.stdout.splitlines()[-1])]


def assert_within_limits(records: list[Record]) -> None:
    assert records, "no kernel was compiled"
    broken = [f"{violation}: {record.label}" for record in records for violation in record.violations()]
    assert not broken, "\n".join(broken)


@not_in["suite"]
@not_in["cover"]
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("group", "arch"), NVIDIA)
def test_kernels_compile_within_limits(group: str, arch: str, tmp_path: pathlib.Path) -> None:
    records = compiled(tmp_path, "gate", group, arch)
    assert_within_limits(records)
    if group in MODELS:
        assert any(record.many_rows for record in records), "no many-row matmul among the plans"


@not_in["suite"]
@not_in["all"]
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "part"), [(arch, part) for arch in COVERED for part in range(PARTS[arch])])
def test_the_cover_compiles_within_limits(arch: str, part: int, tmp_path: pathlib.Path) -> None:
    if unrecorded(int(arch))[part :: PARTS[arch]]:
        assert_within_limits(compiled(tmp_path, "cover", arch, str(part), str(PARTS[arch])))


def test_digests_follow_what_binaries_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    plan, launch = next(found for found in cover(TUNED) if found[1].kernel == SM90_MATMUL_OGS)
    stages = tuple((name, Constant(99) if name == "STAGES" else value) for name, value in launch.arguments)
    others = [dataclasses.replace(launch, num_stages=99), dataclasses.replace(launch, arguments=stages)]
    digests = {digest(plan, one, TUNED) for one in (launch, *others)} | {digest(plan, launch, 100)}
    file = f"moe_core.ops.{SM90_MATMUL_OGS.name.partition(':')[0]}"
    assert code(KERNELS / "common" / "kernels" / "pdl.py") in sources(file), "it calls it through others"
    for name, new in (("sources", lambda module: "another text"), ("_measuring", lambda: "another compiler")):
        with monkeypatch.context() as patch:
            patch.setattr(f"tests.support.compile_gate.cover.{name}", new)
            digests.add(digest(plan, launch, TUNED))
    assert len(digests) == 6
    (tmp_path / "kernel.py").write_text('"""A."""\n\n# B\ndef f(x):\n    """C\n    D"""\n    return "#" + x  # E\n')
    assert code(tmp_path / "kernel.py") == 'def f(x):\n    return "#" + x'


@pytest.mark.parametrize("faults", [sm90, pdl])
def test_faults_are_compiled_again_where_what_they_show_may_change(
    faults: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr("tests.support.compile_gate.cover.PASSED", tmp_path / "passed.json")
    recorded = fault_digests(faults)
    (tmp_path / "passed.json").write_text(json.dumps(list(recorded.values())))
    assert unrecorded_faults(faults) == {} and len({*recorded.values()}) == len(faults.FAULTS)
    name, files = next(iter(faults.FAULTS.items()))
    for file, (fault, *others) in files.items():
        with monkeypatch.context() as patch:
            patch.setitem(faults.FAULTS, name, files | {file: (OpFault(fault.old, fault.new + " "), *others)})
            assert list(unrecorded_faults(faults)) == [name]
    for changed in ("sources", "_measuring", "inspect.getsource"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tests.support.compile_gate.cover.{changed}", lambda *_: "another text")
            assert unrecorded_faults(faults) == faults.FAULTS


@not_in["suite"]
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_the_cover_holds_every_kernel_type_and_constant(arch: int) -> None:
    whole, part = everything(arch), cover(arch)
    assert {launch.kernel for _, launch in part} == {launch.kernel for _, launch in whole}
    for numbers in {False, arch == TUNED}:
        seen = [set().union(*(facts(*found, numbers=numbers) for found in some)) for some in (whole, part)]
        assert seen[0] == seen[1]
    assert 100 < len(part) < len(whole) / 2


@not_in["suite"]
@not_in["cover"]
@pytest.mark.timeout(600)
def test_the_sm90_family_compiles_within_limits(tmp_path: pathlib.Path) -> None:
    records = compiled(tmp_path, "gate", "sm90", "90")
    assert_within_limits(records)
    products = [record for record in records if record.kernel.endswith(":matmul_ogs")]
    assert {record.kernel for record in products} == {SM90_MATMUL_OGS.name}, "a product took another family"
    assert all(record.has_wgmma and record.has_tma for record in products)
    for part in (
        "IN_OUT=True",
        "IN_OUT=False",
        "TRUSTED=True",
        "TRUSTED=False",
        "STAGES=3",
        "STAGES=4",
        "NUM_LAYERS=3",
    ):
        assert any(part in record.label for record in products), part
    for gate in ("halves", "interleaved", "separate", "None"):
        assert any(f"GATE_LAYOUT={gate}" in record.label for record in products), gate
        # An absent output is a constant.
        keeping = [record for record in products if "pre=None" not in record.label]
        assert any(f"GATE_LAYOUT={gate}" in record.label for record in keeping), gate
    assert any(" y=None" in record.label for record in products), "no pre-activation alone"


@not_in["suite"]
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_faulty_copies_compile_to_other_instructions(part: int, tmp_path: pathlib.Path) -> None:
    """What `test_sm90.test_faults_are_found` finds on a GPU is there to be found: in PTX for `make gate-all`, else in
    TTGIR, of products that are not recorded."""
    action, planted = ("compile", sm90.FAULTS) if EXTENT == "all" else ("lower", unrecorded_faults(sm90))
    sm90.assert_faults_show(tmp_path, dict(list(planted.items())[part::4]), action)


@not_in["suite"]
@not_in["all"]
def test_lines_that_moved_are_no_other_instructions(tmp_path: pathlib.Path) -> None:
    file, moved = SM90_MATMUL_OGS.name.partition(":")[0], OpFault("import gluon\n", "import gluon\n\n\n")
    folders = run_on_faulty_copies("sm90", tmp_path, {"result": {file: (moved,)}}, "lower")
    assert len(folders) == 2 and len({(folder / "instructions").read_text() for folder in folders}) == 1


@not_in["cover"]
@pytest.mark.timeout(600)
def test_kernels_compile_for_amd(tmp_path: pathlib.Path) -> None:
    assert_within_limits(compiled(tmp_path, "gate", "from_logits", GFX942))


def test_narrow_moves_are_seen() -> None:
    push, pull = "exchange.kernels.push:push_rows", "exchange.kernels.push:push_results"
    for kernel, ptx, narrow in (
        (push, "ld.global.b32 %r1; st.global.v4.b32 [%rd1]", ""),
        (push, "st.global.v4.b32 [%rd1]; st.global.b16 [%rd1]", "st.global.b16"),
        (pull, "ld.global.cg.v2.b32 {%r1}; st.global.v4.b32 [%rd1]", "ld.global.cg.v2.b32"),
        (push, "ld.global.b32 %r1", "nothing"),
        ("reduction.kernels.reduce:reduce", "st.global.b16 [%rd1]", ""),
    ):
        launch = KernelLaunch(Kernel(kernel), (1, 1, 1), (), 4, 3)
        assert narrow_moves(launch, ptx) == (narrow and f"rows move by {narrow}, not 16 bytes at once")
    for scatter, narrow in (("row", ""), ("bfloat16", "rows move by st.global.b16, not 16 bytes at once")):
        product = KernelLaunch(MATMUL_OGS, (1, 1, 1), tuple(passed(SCATTER=scatter, PDL=None).items()), 4, 3)
        assert narrow_moves(product, "st.global.v4.b32 [%rd1]; st.global.b16; ld.global.cg.b32") == narrow
    for x, narrow in (("x", "rows move by nothing, not 16 bytes at once"), (None, "")):
        once = KernelLaunch(PUSH_TOKENS_ONCE, (1, 1, 1), tuple(passed(x=x).items()), 4, 3)
        assert narrow_moves(once, "st.global.b32 [%rd1]") == narrow, "without x, rows go by themselves"


def test_overwritten_operands_are_seen() -> None:
    """A loop of three wgmma, whose left operands are R4, R8 and R12 on, as nvdisasm shows it."""
    parts = [f"HGMMA.64x128x16.F32.BF16 R24, R{first}, gdesc[UR8], R24, gsb0" for first in (4, 8, 12)]
    back = "@P6 BRA `(.L_x_0)"
    for before, wait, written in (
        ("IMAD.SHL.U32 R12, R90, 0x80, RZ", 0, ""),
        ("IMAD.SHL.U32 R12, R90, 0x80, RZ", 1, "IMAD.SHL.U32 R12"),
        ("IMAD.SHL.U32 R11, R90, 0x80, RZ", 1, ""),
        ("IMAD.SHL.U32 R11, R90, 0x80, RZ", 2, "IMAD.SHL.U32 R11"),
        ("LDS.128 R8, [R90]", 2, "LDS.128 R8"),
        ("LDS.64 R6, [R90]", 2, ""),
        ("IADD3 R15, P6, R90, 0x80, RZ", 1, "IADD3 R15"),
        ("ISETP.GE.AND P6, PT, R12, 0x80, PT", 1, ""),
        ("STS.128 [R12], R12", 1, ""),
    ):
        lines = [before, *parts, f"WARPGROUP.DEPBAR.LE gsb0, 0x{wait:x}", back]
        sass = ".L_x_0:\n" + "\n".join(f"        /*{16 * n:04x}*/   {line} ;" for n, line in enumerate(lines))
        found = overwritten(sass)
        assert found.startswith(written) and bool(found) == bool(written), (before, wait, found)
        once = sass.replace(".L_x_0:", "").replace(back, "EXIT")
        assert not overwritten(once), "behind them there is no next step"


def test_resource_usage_is_read() -> None:
    report = " Function f:\n  REG:168 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:636 TEXTURE:0 SURFACE:0 SAMPLER:0"
    assert resource_usage(report) == (168, 24)


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        ({"binary_bytes": 0}, "no binary"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared memory"),
        ({"shared_bytes": 163 * 1024 + 1, "arch": "80"}, "shared memory"),
        ({"registers": 255, "num_warps": 16}, "registers"),
        ({"stack_bytes": 8}, "spilled"),
        ({"has_wgmma": False}, "without wgmma"),
        ({"has_tma": False}, "without TMA"),
        ({"order": "st.global before the wait"}, "before the wait"),
        ({"narrow": "rows move by st.global.b16"}, "rows move by"),
        ({"overwritten": "LDS.128 R8 writes what one of 2 pending wgmma reads"}, "pending wgmma"),
    ],
)
def test_violations_are_seen(change: dict[str, object], violation: str) -> None:
    assert GOOD.violations() == []
    (found,) = dataclasses.replace(GOOD, **change).violations()
    assert violation in found
