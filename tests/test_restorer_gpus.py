"""Leases and placement of GPUs, over the fake driver in the real helper."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import fake_cuda
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.manifest import Gpu, GpuFacts, GpuState
from restorer.errors import Environment
from restorer.gpu import cuda_driver
from restorer.gpu.cuda import Cuda
from restorer.gpu.gpus import Gpus, Placement, mapping


@pytest.fixture
async def gpus(tmp_path: Path) -> AsyncIterator[Gpus]:
    """Of a host with three."""
    cuda = Cuda(fake_cuda.written(tmp_path / "cuda", gpus=3))
    yield Gpus(cuda, await cuda.facts())
    await cuda.close()


async def test_each_gpu_is_leased_once(gpus: Gpus) -> None:
    first = await gpus.lease("a", 2, need_bytes=1, wait_s=1)
    assert (first.uuids, first.indices, first.free_bytes) == (("GPU-0", "GPU-1"), (0, 1), 8 << 30)
    assert (await gpus.lease("b", 1, need_bytes=1, wait_s=1)).uuids == ("GPU-2",)
    with pytest.raises(
        Environment, match=r"no 1 free GPU\(s\) within 0\.1 s: GPU 0: leased to a; GPU 1: leased to a; GPU 2: leased to b"
    ):
        await gpus.lease("c", 1, need_bytes=1, wait_s=0.1)
    assert (gpus.held("a"), gpus.held("b"), gpus.held("c")) == (("GPU-0", "GPU-1"), ("GPU-2",), ())


async def test_who_waits_gets_what_is_released(gpus: Gpus) -> None:
    await gpus.lease("a", 3, need_bytes=1, wait_s=1)
    waiting = asyncio.create_task(gpus.lease("b", 1, need_bytes=1, wait_s=5))
    await asyncio.sleep(0)
    gpus.release("a")
    assert (await waiting).uuids == ("GPU-0",)
    gpus.release("nobody")


async def test_a_start_that_is_given_up_while_it_waits_holds_nothing(gpus: Gpus) -> None:
    await gpus.lease("a", 3, need_bytes=1, wait_s=1)
    waiting = asyncio.create_task(gpus.lease("b", 1, need_bytes=1, wait_s=60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gpus.release("a")
    assert len((await gpus.lease("c", 3, need_bytes=1, wait_s=1)).uuids) == 3


async def test_the_donors_gpu_is_preferred_and_another_will_do(gpus: Gpus) -> None:
    assert (await gpus.lease("a", 1, need_bytes=1, wait_s=1, prefer=("GPU-1",))).indices == (1,)
    assert (await gpus.lease("b", 1, need_bytes=1, wait_s=1, prefer=("GPU-1",))).indices == (0,)


async def test_a_snapshot_goes_to_its_donors_model_of_gpu_alone(gpus: Gpus) -> None:
    assert gpus.facts is not None
    assert gpus.facts.gpus is not None
    small, *alike = gpus.facts.gpus
    gpus.facts = gpus.facts.model_copy(update={"gpus": (small.model_copy(update={"name": "Testium 2"}), *alike)})
    for box, found in (("a", "GPU-2"), ("b", "GPU-1")):
        assert (await gpus.lease(box, 1, need_bytes=1, wait_s=1, prefer=("GPU-2",))).uuids == (found,)
    with pytest.raises(Environment, match="GPU 1: leased to b; GPU 2: leased to a"):
        await gpus.lease("c", 1, need_bytes=1, wait_s=0.1, prefer=("GPU-2",))
    with pytest.raises(Environment, match="3 GPUs of its donor's model are asked for, and this host has 2"):
        await gpus.lease("c", 3, need_bytes=1, wait_s=0.1, prefer=("GPU-2",))
    assert (await gpus.lease("c", 1, need_bytes=1, wait_s=1)).uuids == ("GPU-0",)


async def test_a_living_process_waits_for_its_own_gpu_and_takes_no_other(gpus: Gpus) -> None:
    await gpus.lease("a", 1, need_bytes=1, wait_s=1, prefer=("GPU-1",))
    waiting = asyncio.create_task(gpus.lease("b", 1, need_bytes=1, wait_s=30, prefer=("GPU-1",), only=True))
    await asyncio.sleep(0)
    gpus.release("a")
    assert (await waiting).uuids == ("GPU-1",)
    with pytest.raises(Environment, match="GPU 1: leased to b"):
        await gpus.lease("c", 1, need_bytes=1, wait_s=0.1, prefer=("GPU-1",), only=True)
    with pytest.raises(Environment, match="it can run on GPU-9 alone"):
        await gpus.lease("c", 1, need_bytes=1, wait_s=60, prefer=("GPU-9",), only=True)


async def test_a_start_that_needs_no_certain_gpu_gets_the_emptiest(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def memory() -> dict[str, dict[str, object]]:
        free = {"GPU-0": 3 << 30, "GPU-1": 8 << 30, "GPU-2": (8 << 30) - 1}
        return {uuid: {"free": count, "total": 8 << 30, "pids": []} for uuid, count in free.items()}

    monkeypatch.setattr(gpus.cuda, "memory", memory)
    taken = [(await gpus.lease(box, 1, need_bytes=0, wait_s=1)).uuids[0] for box in "abc"]
    assert taken == ["GPU-1", "GPU-2", "GPU-0"]


async def test_restore_case_54_a_gpu_without_room_is_not_leased(gpus: Gpus, tmp_path: Path) -> None:
    (tmp_path / "cuda/stranger-bytes").write_text(str(6 << 30))
    assert (await gpus.lease("a", 1, need_bytes=2 << 30, wait_s=1)).free_bytes == 2 << 30
    with pytest.raises(Environment, match=r"GPU 1: 2\.0 GiB free of 3\.0 GiB needed \(used by nobody that the driver names\)"):
        await gpus.lease("b", 1, need_bytes=3 << 30, wait_s=0.1)


async def test_leases_of_a_survivor_are_adopted(gpus: Gpus) -> None:
    gpus.adopt("old", ["GPU-0", "GPU-2"])
    assert (await gpus.lease("new", 1, need_bytes=1, wait_s=1)).uuids == ("GPU-1",)
    gpus.release("old")
    assert (await gpus.lease("other", 2, need_bytes=1, wait_s=1)).uuids == ("GPU-0", "GPU-2")


async def test_more_than_there_are_are_refused_at_once(gpus: Gpus) -> None:
    with pytest.raises(Environment, match=r"4 GPUs are asked for, and this host has 3; lower engine\.gpu\.count"):
        await gpus.lease("a", 4, need_bytes=1, wait_s=60)
    with pytest.raises(Environment, match="the driver on this host knows none"):
        await Gpus(gpus.cuda, None).lease("a", 1, need_bytes=1, wait_s=60)


async def test_state_that_does_not_fit_into_memory_is_not_moved_there(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    engine = await asyncio.create_subprocess_exec(
        "sleep", "60", env={"FAKE_CUDA": str(tmp_path / "cuda"), "HOME": str(home), **os.environ} | {"HOME": str(home)}
    )
    try:
        (home / f"cuda-{engine.pid}").write_text(json.dumps({"state": "running", "index": 0, "bytes": 4 << 30}))
        await gpus.lease("a", 1, need_bytes=1, wait_s=1)
        monkeypatch.setattr("restorer.gpu.gpus.memory", lambda: (8 << 30, 7 << 30))
        await gpus.leave(["GPU-0"], [engine.pid])
        assert not (tmp_path / "cuda/calls").exists()
        monkeypatch.setattr("restorer.gpu.gpus.memory", lambda: (16 << 30, 9 << 30))
        await gpus.leave(["GPU-0"], [engine.pid])
        assert [line.split()[0] for line in (tmp_path / "cuda/calls").read_text().splitlines()] == ["lock", "checkpoint"]
    finally:
        engine.kill()
        await engine.wait()


# ---------------------------------------------------------------- the map


def host(*uuids: str) -> GpuFacts:
    common = {"name": "T", "memory_bytes": 1, "compute": "9.0", "mig": False, "persistence": True}
    return GpuFacts(driver="580", mps=False, gpus=tuple(Gpu(uuid=uuid, **common) for uuid in uuids))


def state(uuids: tuple[str, ...], used: tuple[str, ...]) -> GpuState:
    return GpuState(pids=(1,), uuids=uuids, used=used, state_bytes=0, awake_bytes=0, weights=())


def placed(*uuids: str) -> Placement:
    return Placement(uuids, (0,) * len(uuids), 0)


def test_restore_case_57_nothing_is_mapped_where_nothing_moves() -> None:
    assert mapping(state(("a", "b"), ("a",)), placed("a"), host("a", "b")) == []


def test_restore_case_57_eight_visible_and_one_used_are_all_mapped() -> None:
    eight = tuple("abcdefgh")
    pairs = mapping(state(eight, ("c",)), placed("e"), host(*eight))
    assert dict(pairs) == {**{uuid: uuid for uuid in eight}, "c": "e", "e": "c"}
    assert [old for old, _ in pairs] == list(eight)


def test_another_hosts_gpus_take_the_places_of_the_donors() -> None:
    assert dict(mapping(state(("a", "b"), ("b",)), placed("x"), host("x", "y"))) == {"b": "x", "a": "y"}


def test_another_number_of_gpus_is_refused() -> None:
    with pytest.raises(Environment, match="the snapshot knew 2 GPUs and used 1; this host has 1"):
        mapping(state(("a", "b"), ("a",)), placed("a"), host("a"))


@given(st.data())
def test_a_map_is_one_to_one_and_whole_wherever_the_engine_goes(data: st.DataObject) -> None:
    old = tuple(data.draw(st.permutations("abcdef")))
    new = tuple(data.draw(st.sampled_from(["abcdef", "abcxyz", "uvwxyz"])))
    count = data.draw(st.integers(1, 6))
    used = tuple(data.draw(st.permutations(old))[:count])
    target = tuple(data.draw(st.permutations(new))[:count])
    pairs = dict(mapping(state(old, used), placed(*target), host(*new))) or {uuid: uuid for uuid in old}
    assert sorted(pairs) == sorted(old)
    assert sorted(pairs.values()) == sorted(new)
    assert [pairs[uuid] for uuid in used] == list(target)


# ---------------------------------------------------------------- how GPUs are linked, as NVML says it


class Nvml:
    """As much of NVML as is asked for links: pairs of GPUs, and links that are up."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_UNKNOWN = 2, 3, 999

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self, up: list[int], nearness: int, fault: int | None = None) -> None:
        self._up, self._nearness, self._fault = up, nearness, fault

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        assert one != other
        return self._nearness

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if self._fault is not None:
            raise self.NVMLError(self._fault)
        return int(link < self._up[handle])


def test_the_class_of_links_is_the_same_for_gpus_in_any_order() -> None:
    assert cuda_driver._topology(Nvml([18, 18], 40), [0, 1]) == "NVLinks 18 18; bus 40"
    assert cuda_driver._topology(Nvml([18, 4], 40), [0, 1]) == cuda_driver._topology(Nvml([4, 18], 40), [0, 1])
    assert cuda_driver._topology(Nvml([0, 0, 0], 50), [0, 1, 2]) == "NVLinks 0 0 0; bus 50 50 50"
    assert cuda_driver._topology(Nvml([18], 0), [0]) == ""


def test_gpus_without_nvlink_have_none_and_a_driver_that_fails_says_nothing() -> None:
    assert cuda_driver._topology(Nvml([9, 9], 20, Nvml.NVML_ERROR_NOT_SUPPORTED), [0, 1]) == "NVLinks 0 0; bus 20"
    assert cuda_driver._topology(Nvml([9, 9], 20, Nvml.NVML_ERROR_UNKNOWN), [0, 1]) is None
