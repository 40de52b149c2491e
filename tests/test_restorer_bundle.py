"""OCI bundles: what runc is told, with and without a bundle of the operator's; and the control groups it makes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from restorer.boxes import cgroups
from restorer.checkpoint import bundle
from restorer.errors import Environment


def written(folder: Path, given: Path | None = None, **more: Any) -> Any:
    """The configuration of a bundle made in ``folder``."""
    private = folder / "private"
    (private / "tmp").mkdir(parents=True)
    env = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "HOME": "/run/x/box/home", "TMPDIR": "/run/x/box/tmp", "A": "1"}
    told: dict[str, Any] = {"argv": ["/bin/engine", "--x"], "env": env, "settings": {"A": "1"}, "named": []} | more
    places = {"private": private, "mountpoint": Path("/run/x/box"), "criu_config": folder / "criu.conf"}
    bundle.write(folder / "bundle", given=given, group="rewake/abc", **places, **told)
    return json.loads((folder / "bundle/config.json").read_text())


def unpacked(folder: Path, **more: Any) -> Path:
    """An operator's bundle."""
    (folder / "image").mkdir(parents=True)
    process = {"env": ["PATH=/opt/engine/bin", "A=theirs", "HOME=/root", "CUDA=12"], "user": {"uid": 0, "gid": 0}}
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"},
        {"destination": "/models", "type": "bind", "source": "/srv/models", "options": ["rbind", "ro"]},
        {"destination": "/models/hot", "type": "none", "source": "/nvme/hot", "options": ["bind", "ro"]},
    ]
    config = {"root": {"path": "image"}, "process": process, "mounts": mounts, "hooks": {"prestart": [{"path": "/bin/evil"}]}}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def test_without_a_bundle_the_host_is_seen_read_only_and_the_private_folders_are_the_boxs(tmp_path: Path) -> None:
    config = written(tmp_path)
    mounts = {one["destination"]: one for one in config["mounts"]}
    assert mounts["/usr"]["options"] == ["bind", "ro"]
    assert mounts["/run/x/box"]["source"] == str(tmp_path / "private")
    assert mounts["/tmp"]["source"] == str(tmp_path / "private/tmp")
    order = [one["destination"] for one in config["mounts"]]
    assert order.index("/run") < order.index("/run/x/box")
    assert {one["type"] for one in config["linux"]["namespaces"]} == {"pid", "mount", "ipc", "uts"}
    assert config["process"]["args"][-2:] == ["/bin/engine", "--x"]
    assert config["process"]["terminal"] is False
    assert config["linux"]["seccomp"]["syscalls"][0]["names"][0] == "io_uring_setup"
    links = {path.name for path in Path("/").iterdir() if path.is_symlink()}
    assert {path.name for path in (tmp_path / "bundle/rootfs").iterdir()} == links


def test_a_file_system_of_its_own_is_mounted_only_where_the_engine_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = ["/", "/proc", "/srv/models", "/srv/other", "/usr"]
    monkeypatch.setattr(bundle, "_mount_points", lambda: points)
    config = written(tmp_path, named=["/bin/engine", "--model=/srv/models/a.gguf", "0.0.0.0"])
    mounted = [one["destination"] for one in config["mounts"]]
    assert "/srv/models" in mounted
    assert "/srv/other" not in mounted


def test_a_folder_below_tmp_is_seen_only_where_the_engine_is_told_of_it(tmp_path: Path) -> None:
    config = written(tmp_path, named=["/tmp", f"--config={Path('/tmp') / 'no-such' / 'file'}", str(tmp_path / "model.gguf")])
    mounted = [one["destination"] for one in config["mounts"]]
    below = [one for one in mounted if one.startswith("/tmp/")]
    assert below == ([f"/tmp/{tmp_path.parts[2]}"] if tmp_path.parts[1] == "tmp" else [])
    assert all(mounted.index(one) > mounted.index("/tmp") for one in below)


def test_restore_case_49_a_bundle_gives_root_environment_and_binds_and_no_hook_of_it_runs(tmp_path: Path) -> None:
    config = written(tmp_path / "box", unpacked(tmp_path / "given"))
    assert config["root"] == {"path": str(tmp_path / "given/image"), "readonly": True}
    assert "hooks" not in config
    env = dict(word.split("=", 1) for word in config["process"]["env"])
    assert env == {
        "PATH": "/opt/engine/bin",
        "LANG": "C.UTF-8",
        "HOME": "/run/x/box/home",
        "TMPDIR": "/run/x/box/tmp",
        "A": "1",
        "CUDA": "12",
    }
    mounted = [one["destination"] for one in config["mounts"]]
    assert mounted.count("/proc") == 1
    assert mounted[:2] == ["/models", "/models/hot"]
    assert "/dev/mqueue" not in mounted


def test_files_of_a_bundle_are_found_on_the_host(tmp_path: Path) -> None:
    given = unpacked(tmp_path)
    seen = ["/usr/lib/libc.so.6", "/models/a.gguf", "/models/hot/b.gguf", "/modelsx/c"]
    assert bundle.located(given, seen) == [
        f"{tmp_path}/image/usr/lib/libc.so.6",
        "/srv/models/a.gguf",
        "/nvme/hot/b.gguf",
        f"{tmp_path}/image/modelsx/c",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as an OCI configuration"),
        ("{}", "has no root"),
        (json.dumps({"root": {"path": "gone"}}), "is no folder; unpack the image there"),
        (json.dumps({"root": {"path": "."}, "linux": {"namespaces": [{"type": "user"}]}}), "asks for a user namespace"),
    ],
)
def test_what_is_no_usable_bundle_is_refused_by_its_path(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Environment, match=reason) as caught:
        bundle.read(tmp_path)
    assert str(tmp_path) in str(caught.value)


async def test_a_control_group_goes_with_what_it_holds_in_every_hierarchy(tmp_path: Path) -> None:
    for hierarchy in ("memory", "freezer", "unified"):
        (tmp_path / hierarchy / "rewake/abc/inner").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    await cgroups.remove("rewake/abc", tmp_path)
    assert not any((tmp_path / hierarchy / "rewake").exists() for hierarchy in ("memory", "freezer", "unified"))
    assert (tmp_path / "pids").exists()


async def test_a_group_that_is_still_busy_is_waited_for_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "memory/rewake/abc").mkdir(parents=True)
    (tmp_path / "memory/rewake/other").mkdir()
    (busy := tmp_path / "memory/rewake/abc/held").write_text("")
    removal = asyncio.create_task(cgroups.remove("rewake/abc", tmp_path))
    await asyncio.sleep(0)
    busy.unlink()
    await removal
    assert [path.name for path in (tmp_path / "memory/rewake").iterdir()] == ["other"]


def test_what_a_killed_tool_left_frozen_is_let_go(tmp_path: Path) -> None:
    for hierarchy, file in (("freezer", "freezer.state"), ("unified", "cgroup.freeze")):
        (tmp_path / hierarchy / "rewake/abc").mkdir(parents=True)
        (tmp_path / hierarchy / "rewake/abc" / file).write_text("FROZEN")
    cgroups.thaw("rewake/abc", tmp_path)
    assert (tmp_path / "freezer/rewake/abc/freezer.state").read_text() == "THAWED"
    assert (tmp_path / "unified/rewake/abc/cgroup.freeze").read_text() == "0"


def test_restore_case_46_who_was_restored_elsewhere_is_put_into_its_own_group(tmp_path: Path) -> None:
    for hierarchy in ("memory", "pids"):
        (tmp_path / hierarchy / "rewake/abc").mkdir(parents=True)
        (tmp_path / hierarchy / "rewake/abc/cgroup.procs").write_text("")
    born = [[7], [7, 8], [7, 8]]

    def pids() -> list[int]:
        """A second one is born meanwhile; unlike these files, the kernel's keep who is in already."""
        for file in tmp_path.glob("*/rewake/abc/cgroup.procs"):
            members.setdefault(file, set()).update(map(int, file.read_text().split()))
            file.write_text(" ".join(map(str, members[file])))
        return born.pop(0) if len(born) > 1 else born[0]

    members: dict[Path, set[int]] = {}
    cgroups.gather("rewake/abc", pids, tmp_path)
    assert list(members.values()) == [{7, 8}, {7, 8}]


def test_who_cannot_be_put_into_its_group_fails_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory/rewake/abc").mkdir(parents=True)
    (tmp_path / "memory/rewake/abc/cgroup.procs").symlink_to("/dev/null")
    monkeypatch.setattr(cgroups, "_GATHER_S", 0.05)
    with pytest.raises(Environment, match=r"processes \[7\] cannot be put into control group rewake/abc"):
        cgroups.gather("rewake/abc", lambda: [7], tmp_path)
