"""What is refused of GPU state before anything is frozen: drivers that are known to fail, as the fake driver reports them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest

from policies.config import Config, parse
from policies.manifest import GpuFacts, GpuState
from restorer.adapters.engines import adapter
from restorer.errors import SnapshotError
from restorer.gpu.cuda import Cuda
from restorer.machine.host import Host
from restorer.operations import gpustate
from restorer.records.stages import Stages


def config(kind: str = "vllm", count: int = 1, **word: str) -> Config:
    engine = {"kind": kind, "command": ["/bin/engine"], "gpu": {"count": count}}
    return parse({"models": {"m": {"engine": engine}}, "restorer": {"drivers": word}})


async def facts(folder: Path, **more: Any) -> GpuFacts:
    """What the restorer learns of a driver, through the real helper."""
    cuda = Cuda(fake_cuda.written(folder / "cuda", gpus=2, **more))
    try:
        return await cuda.facts()
    finally:
        await cuda.close()


async def captured(here: GpuFacts, settings: Config) -> None:
    """Take an engine off its GPU, up to where the driver would be asked for the first time."""

    class Asked(Exception):
        pass

    async def find(_: Any) -> list[int]:
        raise Asked

    def model(name: str) -> Any:
        return settings.models[name]

    host: Any = SimpleNamespace(facts=SimpleNamespace(gpu=here), config=settings, cuda=SimpleNamespace(find=find), model=model)
    donor: Any = SimpleNamespace(engine=adapter("m", settings.models["m"]), pid=1)
    with pytest.raises(Asked):
        async with gpustate.asleep(host, donor, Stages(), keep=True):
            raise AssertionError


async def test_restore_case_55_no_engine_is_captured_with_a_driver_that_hangs_the_host(tmp_path: Path) -> None:
    here = await facts(tmp_path, driver="595.58", open_module=True)
    with pytest.raises(SnapshotError, match="can hang the whole host") as caught:
        await captured(here, config())
    assert "restorer.drivers: {'595': allow}" in str(caught.value)
    await captured(here, config(**{"595": "allow"}))


async def test_restore_case_68_more_gpus_than_an_engine_has_survived_are_refused(tmp_path: Path) -> None:
    here = await facts(tmp_path, topology="NVLinks 18 18; bus 30")
    for kind, most in (("tensorrt-llm", 1), ("sglang", 1), ("vllm", 2)):
        with pytest.raises(
            SnapshotError, match=rf"{kind} on {most + 1} GPUs has not been seen to survive a checkpoint \(on {most} it"
        ):
            await captured(here, config(kind, count=most + 1))
        await captured(here, config(kind, count=most))


async def test_what_no_host_could_be_compared_with_is_not_captured(tmp_path: Path) -> None:
    """On several GPUs a snapshot goes only where they are linked alike, this host included."""
    here, pair = await facts(tmp_path), config(count=2)
    with pytest.raises(
        SnapshotError, match=r"does not tell how this host's GPUs are linked.*matching\.rules\.gpu\.topology: report"
    ):
        await captured(here, pair)
    await captured(here, config())
    document = pair.model_dump(mode="json", exclude_unset=True) | {"matching": {"rules": {"gpu.topology": "report"}}}
    await captured(here, parse(document))


async def test_restore_case_55_no_snapshot_is_restored_with_it_whatever_its_manifest_says(tmp_path: Path) -> None:
    here = await facts(tmp_path, driver="595.58", open_module=True)
    judge = SimpleNamespace(judge=lambda *_: SimpleNamespace(mismatch=None, allowed=True))
    snapshots = SimpleNamespace(folder=lambda _: tmp_path)
    manifest: Any = SimpleNamespace(id="x", gpu=object())
    for word, refused in (({}, True), ({"595": "allow"}, False)):
        host: Any = SimpleNamespace(facts=SimpleNamespace(gpu=here), config=config(**word), judge=judge, snapshots=snapshots)
        fields = [one.field for one in Host.distrust(host, manifest)]
        assert ("host.gpu.driver" in fields) is refused
    assert "host.gpu.driver" not in [one.field for one in Host.distrust(host, SimpleNamespace(id="x", gpu=None))]  # type: ignore[arg-type]


async def test_a_driver_without_a_map_restores_onto_the_donors_gpu_alone(tmp_path: Path) -> None:
    state = GpuState(pids=(1,), uuids=("GPU-0", "GPU-1"), used=("GPU-1",), state_bytes=1, awake_bytes=1 << 30, weights=())
    for driver, only in (("570.1", True), ("580.1", False)):
        host: Any = SimpleNamespace(facts=SimpleNamespace(gpu=await facts(tmp_path, driver=driver)), config=config())
        need = gpustate.need(host, state)
        assert (need.prefer, need.only) == (("GPU-1",), only)
        assert need.bytes > 1 << 30
