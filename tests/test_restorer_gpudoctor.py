"""The GPU lines of the doctor, over the fake driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

from policies.config import Config, parse
from restorer.checks import doctor, gpudoctor


def config(folder: Path, helper: list[str] | None, gpus: int = 1, **more: Any) -> Config:
    engine = {"kind": "vllm", "command": [sys.executable], "gpu": {"count": gpus}}
    restorer = ({"gpu_helper": helper} if helper else {}) | more
    return parse({"models": {"m": {"engine": engine}}, "restorer": restorer, "state_dir": str(folder / "state")})


def changed(folder: Path, **facts: Any) -> None:
    path = folder / "facts.json"
    document = json.loads(path.read_text())
    gpu = {name: facts.pop(name) for name in ("mig", "persistence") if name in facts}
    document["facts"] |= facts
    document["facts"]["gpus"] = [{**one, **gpu} for one in document["facts"]["gpus"]]
    path.write_text(json.dumps(document))


async def test_a_host_in_order(tmp_path: Path) -> None:
    found, _ = await gpudoctor.examine(config(tmp_path, fake_cuda.written(tmp_path / "cuda", gpus=2)))
    assert [(one.name, one.ok) for one in found] == [
        ("gpu driver", "ok"),
        ("gpu persistence", "ok"),
        ("gpu mig", "ok"),
        ("gpu mps", "ok"),
        ("gpu 0", found[4].ok),
        ("gpu 1", found[5].ok),
    ]
    assert found[4].found.startswith("Testium 1, 8 GiB; ")
    assert found[4].found.endswith(" GB/s from pinned memory")


@pytest.mark.parametrize(
    ("facts", "name", "found"),
    [
        ({"driver": "535.1"}, "gpu driver", "535.1"),
        ({"driver": None}, "gpu driver", "of unknown version"),
        ({"persistence": False}, "gpu persistence", "off on GPU 0: the first start pays seconds"),
        ({"mig": True}, "gpu mig", "on or unknown on GPU 0: nothing there can be captured"),
        ({"mig": None}, "gpu mig", "on or unknown on GPU 0: nothing there can be captured"),
        ({"mps": True}, "gpu mps", "runs: its clients cannot be captured"),
    ],
)
async def test_what_is_out_of_order_is_said_with_its_remedy(tmp_path: Path, facts: dict[str, Any], name: str, found: str) -> None:
    helper = fake_cuda.written(tmp_path / "cuda")
    changed(tmp_path / "cuda", **facts)
    (finding,) = [one for one in (await gpudoctor.examine(config(tmp_path, helper)))[0] if one.name == name]
    assert (finding.ok, finding.found) == ("warn", found)
    assert finding.remedy


@pytest.mark.parametrize(
    ("facts", "word", "ok", "found", "remedy"),
    [
        ({"driver": "595.58", "open_module": True}, {}, "warn", "595.58, open kernel module", "can hang the whole host"),
        ({"driver": "595.58"}, {}, "warn", "595.58", "can hang the whole host"),
        ({"driver": "595.58", "open_module": False}, {}, "ok", "595.58, proprietary kernel module", ""),
        ({"driver": "595.58", "open_module": True}, {"595": "allow"}, "ok", "595.58, open kernel module", ""),
        ({"driver": "570.1"}, {}, "warn", "570.1", "onto another GPU than it was taken from"),
        ({"driver": "580.1"}, {"580": "deny"}, "warn", "580.1", "take it out of restorer.drivers"),
    ],
)
async def test_restore_case_55_the_doctor_says_what_a_driver_is_not_used_for(
    tmp_path: Path, facts: dict[str, Any], word: dict[str, str], ok: str, found: str, remedy: str
) -> None:
    helper = fake_cuda.written(tmp_path / "cuda", **facts)
    findings, _ = await gpudoctor.examine(config(tmp_path, helper, drivers=word))
    assert (findings[0].name, findings[0].ok, findings[0].found) == ("gpu driver", ok, found)
    assert remedy in findings[0].remedy


async def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    found, _ = await gpudoctor.examine(config(tmp_path, fake_cuda.written(tmp_path / "cuda"), gpus=2))
    assert (found[-1].name, found[-1].ok, found[-1].found) == ("models.m.gpu", "fail", "2 GPUs asked for, 1 here")


async def test_a_link_that_cannot_be_measured_is_a_warning(tmp_path: Path) -> None:
    helper = fake_cuda.written(tmp_path / "cuda", total_bytes=1 << 20)
    found, _ = await gpudoctor.examine(config(tmp_path, helper))
    assert (found[-1].name, found[-1].ok) == ("gpu 0", "warn")
    assert "could not be measured" in found[-1].found


async def test_a_helper_that_does_not_start_fails_what_wants_a_gpu(tmp_path: Path) -> None:
    (finding,), _ = await gpudoctor.examine(config(tmp_path, ["/no/helper"]))
    assert (finding.name, finding.ok) == ("gpu helper", "fail")
    assert "/no/helper does not start" in finding.found


async def test_no_driver_is_a_failure_of_models_that_want_one_and_nothing_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpudoctor, "NVIDIA", tmp_path / "none")
    (finding,), _ = await gpudoctor.examine(config(tmp_path, None))
    assert (finding.name, finding.ok) == ("models.m.gpu", "fail")
    assert await gpudoctor.examine(config(tmp_path, None, gpus=0)) == ([], None)
    assert "models.m.gpu" in [one.name for one in await doctor.examine(config(tmp_path, None))]
