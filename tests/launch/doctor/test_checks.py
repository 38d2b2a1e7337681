"""The findings of the doctor about a host, from given facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.engine.sglang import server
from asyncrl.launch.doctor import checks
from asyncrl.launch.doctor.checks import Severity, examine
from asyncrl.launch.doctor.facts import (
    AcceleratorFacts,
    AddressFact,
    FolderFacts,
    HostFacts,
    HostMark,
    KeyFacts,
    LauncherFact,
    LimitFacts,
    PackageFacts,
)
from asyncrl.machine.gpus import GpuFact

GPU = GpuFact("NVIDIA H200", 143_771, 0, "Default")
MARK = HostMark("one", 0.0, {"torch": "2.13.0"}, "key")
OTHER = replace(MARK, host="two")
HEALTHY = HostFacts(
    host="one",
    python="3.12.1",
    accelerators=AcceleratorFacts(
        devices=2, gpus=[GPU, GPU], driver="580.1", torch_gpus=2, torch_cuda="13.0", nccl="2.28.3"
    ),
    limits=LimitFacts(65536, -1, 64 << 30, 64 << 30, 32768),
    folder=FolderFacts("runs", free=10**12, kind="ext4", marks=[MARK, OTHER]),
    packages=PackageFacts(extras={"math": True, "wandb": False}),
    addresses=[
        AddressFact("network.replay_port", "10.0.0.1:5755", True),
        AddressFact("--connect", "10.0.0.2:5756", False),
    ],
    launcher=[LauncherFact("a shell on two")],
    keys=KeyFacts("keys", is_allowed=True),
    server_python="python3",
    server_version="0.5.22",
)


def gpus(**changes: Any) -> HostFacts:
    return replace(HEALTHY, accelerators=replace(HEALTHY.accelerators, **changes))


def limits(**changes: Any) -> HostFacts:
    return replace(HEALTHY, limits=replace(HEALTHY.limits, **changes))


def folder(**changes: Any) -> HostFacts:
    return replace(HEALTHY, folder=replace(HEALTHY.folder, **changes))


def beside(**changes: Any) -> HostFacts:
    return folder(marks=[MARK, replace(OTHER, **changes)])


def test_a_healthy_host_passes_every_check() -> None:
    found = examine(HEALTHY)
    assert {each.verdict for each in found} == {Severity.OK}
    assert not any(each.mend for each in found)
    names = {each.check for each in found}
    assert names == {
        *("gpus", "nccl", "open files", "locked memory", "shared memory", "ports", "folder", "disk", "clock", "keys"),
        *("compiler", "packages", "servers", "launcher"),
    }


def test_gpus_that_somebody_has_hidden_are_no_problem() -> None:
    for visible in ("", "-1"):
        found = examine(gpus(visible=visible, torch_gpus=0))
        assert {each.verdict for each in found} == {Severity.OK}


def test_memory_counts_only_on_gpus_that_a_run_may_use() -> None:
    busy = [GPU, replace(GPU, used=90_000)]
    for visible, verdicts in (("", ["ok"]), ("0", ["ok"]), ("1", ["ok", "warning"]), ("GPU-7", ["ok", "warning"])):
        found = examine(gpus(gpus=busy, visible=visible, torch_gpus=int(visible != "")))
        assert [each.verdict.value for each in found if each.check == "gpus"] == verdicts


def test_a_host_without_gpus_is_healthy() -> None:
    found = examine(replace(HEALTHY, accelerators=AcceleratorFacts()))
    assert {each.verdict for each in found} == {Severity.OK}


def test_an_address_of_this_host_that_does_not_answer_is_no_matter_of_firewalls() -> None:
    weights = AddressFact("network.weights_port", "127.0.0.1:5756", False, "Connection refused")
    (bad,) = (each for each in examine(replace(HEALTHY, addresses=[weights])) if each.verdict is not Severity.OK)
    assert "firewalls" not in bad.mend
    assert "see its logs" in bad.mend


@pytest.mark.parametrize(
    ("facts", "verdict", "check", "text", "mend"),
    [
        (gpus(gpus=[], driver_error="there is no nvidia-smi"), "problem", "gpus", "has 2 NVIDIA GPUs", "driver"),
        (gpus(torch_cuda="", torch_gpus=0), "problem", "gpus", "built without CUDA", "pytorch.org"),
        (gpus(torch_gpus=0, torch_error="too old"), "problem", "gpus", "0 of 2 GPUs: too old", "CUDA 13.0"),
        (gpus(visible="0,7", torch_gpus=1), "problem", "gpus", "uses 1 of 2", "CUDA_VISIBLE_DEVICES"),
        (gpus(gpus=[GPU, replace(GPU, used=90_000)]), "warning", "gpus", "memory of GPU 1", "nvidia-smi"),
        (gpus(gpus=[replace(GPU, compute_mode="Exclusive_Process")]), "warning", "gpus", "GPU 0", "compute-mode=0"),
        (gpus(nccl=""), "problem", "nccl", "no NCCL", "torch with NCCL"),
        (gpus(missing_to_compile=["C compiler"]), "problem", "compiler", "no C compiler", "python3-dev"),
        (limits(files=1000), "problem", "open files", "1,000", "ulimit -n"),
        (limits(files=2000), "warning", "open files", "2,000", "ulimit -n"),
        (limits(shared_memory_free=60 << 20), "problem", "shared memory", "0.06 of", "--shm-size"),
        (limits(first_outgoing_port=1024), "warning", "ports", "from 1024", "ip_local_port_range"),
        (
            replace(HEALTHY, addresses=[AddressFact("replay", "10.0.0.1:1", False, "refused", 12.3)]),
            *("warning", "ports", "refused; the run was started 12 s ago", "look again"),
        ),
        (
            replace(HEALTHY, launcher=[LauncherFact("a shell on b", "no route")]),
            *("problem", "launcher"),
            "b: no",
            "mend",
        ),
        (folder(error="Permission denied"), "problem", "folder", "Permission denied", "run.dir"),
        (folder(kind="nfs4"), "warning", "folder", "nfs4", "local disk"),
        (folder(free=10**8), "problem", "disk", "0.1 GB", "make room"),
        (folder(free=10**10), "warning", "disk", "10.0 GB", "make room"),
        (beside(skew_s=9.5), "warning", "clock", "the clock of two is 9.5 s ahead", "time server"),
        (beside(server_key="another"), "problem", "keys", "differs from the one on two", "copy server.public"),
        (beside(versions={"torch": "2.11.0"}), "problem", "packages", "other versions are on two", "same versions"),
        (replace(HEALTHY, server_error="no module"), "problem", "servers", "python3: no module", "engine.python"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named_with_what_mends_it(
    facts: HostFacts, verdict: str, check: str, text: str, mend: str
) -> None:
    (bad,) = (each for each in examine(facts) if each.verdict is not Severity.OK)
    assert (bad.verdict, bad.check) == (verdict, check)
    assert text in bad.text
    assert mend in bad.mend


def test_a_host_whose_clock_is_unknown_is_not_said_to_have_a_wrong_one() -> None:
    own, unknown = replace(MARK, skew_s=-9.5), replace(OTHER, skew_s=None)
    (clock,) = (each for each in examine(folder(marks=[own, unknown])) if each.check == "clock")
    assert "the clock of the folder is 9.5 s ahead" in clock.text
    assert "two" not in clock.text
    (clock,) = (each for each in examine(folder(marks=[MARK, unknown])) if each.check == "clock")
    assert (clock.verdict, clock.text) == (Severity.OK, "within 2 s of the folder")


@pytest.mark.parametrize(
    ("facts", "texts"),
    [
        (
            replace(HEALTHY, keys=KeyFacts("keys", ["users can read client.secret"], False)),
            ["users can read", "the list `allowed` lacks"],
        ),
        (
            replace(HEALTHY, packages=PackageFacts(["lmdb>=1.6"], [("torch>=2.11", "2.1")], [("rich", "1", "2")])),
            ["lmdb>=1.6 is missing; torch>=2.11 is needed, 2.1 is installed", "rich 1 instead of 2"],
        ),
        (
            replace(HEALTHY, addresses=[replace(each, error="no") for each in HEALTHY.addresses]),
            ["this host cannot listen at network.replay_port 10.0.0.1:5755: no", "10.0.0.2:5756 cannot be reached: no"],
        ),
        (
            replace(gpus(has_infiniband=True), limits=replace(HEALTHY.limits, locked=8 << 20)),
            ["RDMA network"],
        ),
    ],
    ids=["keys", "packages", "addresses", "locked memory"],
)
def test_all_that_is_wrong_is_said_at_once(facts: HostFacts, texts: list[str]) -> None:
    bad = [each for each in examine(facts) if each.verdict is not Severity.OK]
    assert len(bad) == len(texts)
    assert all(text in each.text and each.mend for text, each in zip(texts, bad, strict=True))


@pytest.mark.parametrize(
    ("version", "is_older"),
    [
        ("0.5.22", False),
        ("0.5.22rc1", False),
        ("0.6", False),
        ("0.5.17.post1", True),
        ("0.5", True),
        ("unknown", False),
    ],
)
def test_an_older_sglang_works_with_a_remark(version: str, is_older: bool) -> None:
    (found,) = (each for each in examine(replace(HEALTHY, server_version=version)) if each.check == "servers")
    assert found.verdict is Severity.OK
    assert ("interrupts its requests" in found.text) is is_older


def test_the_remark_is_about_the_versions_whose_requests_an_update_interrupts() -> None:
    assert checks.SPANS_SINCE == server.SPANS_SINCE
