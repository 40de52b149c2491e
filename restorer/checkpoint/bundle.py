"""OCI bundles: what runc is told to make of a box's folders and an engine's command.

With ``engine.bundle``, the operator's bundle gives the root file system, environment, user, rights and further mounts, and
Rewake the rest; without one, the engine sees this host's own file system, read-only. Either way its private folders are the
box's, at the same places in every box, its network is the box's, and io_uring is kept from it. Hooks of a bundle are not run:
they would be run again at each restore.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from restorer.errors import Environment

CONFIG = "config.json"
_OURS = ("/proc", "/dev", "/sys", "/tmp")
"""Mounted by us, whatever a bundle says of them and of what lies below."""
_NAMED = re.compile(r"(?:^|=)(/[^=]+)$")
_ESCAPED = re.compile(r"\\(\d{3})")
_CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_IPC_LOCK", "CAP_KILL", "CAP_NET_BIND_SERVICE"),
    *("CAP_SETGID", "CAP_SETUID", "CAP_SYS_NICE"),
)
_ENOSYS = 38
_RUN = 'exec "$@" </dev/null >>engine.log 2>&1'
"""What an engine has open must lie in its own file system, or it could not be restored there."""


def write(
    folder: Path,
    *,
    given: Path | None,
    private: Path,
    mountpoint: Path,
    argv: Sequence[str],
    env: Mapping[str, str],
    settings: Mapping[str, str],
    named: Iterable[str],
    group: str,
    criu_config: Path,
) -> None:
    """Make the bundle of one box. Blocks.

    Args:
        folder: where to.
        given: the operator's bundle, if there is one.
        private: the box's private folder, to be seen at ``mountpoint``.
        env: the engine's whole environment; ``settings``: what of it the operator set, which a bundle cannot change.
        named: paths that the engine is told; those on file systems of their own get a mount.
        criu_config: the file with CRIU's options.

    Raises:
        Environment: the given bundle is none.
    """
    named = list(named)
    (folder / "rootfs").mkdir(parents=True)
    theirs = {} if given is None else read(given)
    process = theirs.get("process", {})
    if given is None:
        root, mounts = folder / "rootfs", _host_mounts(folder / "rootfs", named)
    else:
        root, mounts = _rootfs(given, theirs), _their_mounts(theirs)
        inherited = dict(word.partition("=")[::2] for word in process.get("env", ()))
        kept = {name: env[name] for name in ("HOME", "TMPDIR")}
        env = {**env, **inherited, **kept, **settings}
    user = process.get("user", {})
    _own(private, int(user.get("uid", 0)), int(user.get("gid", 0)))
    config = {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "annotations": {"org.criu.config": str(criu_config)},
        "linux": _limits(group),
        "process": _process(process, argv, env, mountpoint),
        "mounts": [
            *mounts,
            *_kernel_mounts(),
            _bind("/dev/shm", "/dev/shm"),
            _bind(str(private / "tmp"), "/tmp"),
            *([] if given is not None else _below_tmp(named)),
            _bind(str(private), str(mountpoint)),
        ],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


def _process(theirs: Mapping[str, Any], argv: Sequence[str], env: Mapping[str, str], folder: Path) -> dict[str, Any]:
    return {
        "terminal": False,
        "user": theirs.get("user", {"uid": 0, "gid": 0}),
        "args": ["/bin/sh", "-c", _RUN, "sh", *argv],
        "env": [f"{name}={value}" for name, value in env.items()],
        "cwd": str(folder),
        "noNewPrivileges": True,
        "capabilities": theirs.get("capabilities", dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)),
        **({"rlimits": theirs["rlimits"]} if "rlimits" in theirs else {}),
    }


def _limits(group: str) -> dict[str, Any]:
    rings = {
        "names": ["io_uring_setup", "io_uring_enter", "io_uring_register"],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": _ENOSYS,
    }
    return {
        "cgroupsPath": f"/{group}",
        # No network of its own: the box's, which runc itself is in.
        "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
        "resources": {"devices": [{"allow": True, "access": "rwm"}]},
        "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rings]},
    }


def read(given: Path) -> dict[str, Any]:
    """The configuration of the operator's bundle.

    Raises:
        Environment: it cannot be read, or asks for what we do not do.
    """
    path = given / CONFIG
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Environment(f"engine.bundle: {path} cannot be read as an OCI configuration: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("root"), dict):
        raise Environment(f"engine.bundle: {path} has no root; make it with `runc spec`, or unpack an image with umoci")
    kinds = [one.get("type") for one in found.get("linux", {}).get("namespaces", ())]
    if "user" in kinds:
        raise Environment(f"engine.bundle: {path} asks for a user namespace, in which an engine cannot be captured; take it out")
    if not _rootfs(given, found).is_dir():
        raise Environment(f"engine.bundle: its root {_rootfs(given, found)} is no folder; unpack the image there")
    return found


def located(given: Path, paths: Sequence[str]) -> list[str]:
    """Where files that an engine in this bundle sees under these names lie on this host."""
    theirs = read(given)
    mounts = [(one["destination"].rstrip("/"), one["source"]) for one in _their_mounts(theirs)]
    # The deepest that holds a path is the one it is seen through.
    mounts = [*sorted(mounts, reverse=True), ("", str(_rootfs(given, theirs)))]
    return [next(source + path.removeprefix(at) for at, source in mounts if f"{path}/".startswith(f"{at}/")) for path in paths]


def _rootfs(given: Path, config: Mapping[str, Any]) -> Path:
    return given / str(config["root"].get("path", "rootfs"))


def _their_mounts(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for mount in config.get("mounts", ()):
        destination = os.path.normpath(mount["destination"])
        ours = any(destination == one or destination.startswith(f"{one}/") for one in _OURS)
        if not ours and "bind" in (mount.get("type"), *mount.get("options", ())):
            found.append(mount)
    return found


def _host_mounts(rootfs: Path, named: Iterable[str]) -> list[dict[str, Any]]:
    """This host's folders, one by one, since a file system cannot be put over itself; and its links, in ``rootfs``."""
    tops = []
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            (rootfs / entry.name).symlink_to(os.readlink(entry))
        elif entry.is_dir() and str(entry) not in _OURS:
            tops.append(str(entry))
    paths = [Path(real) for path in _paths(named) for real in (path, os.path.realpath(path))]
    points = {
        point for point in _mount_points() if point not in ("/", *tops, *_OURS) for path in paths if path.is_relative_to(point)
    }
    return [_bind(path, path, "ro") for path in (*tops, *sorted(points))]


def _below_tmp(named: Iterable[str]) -> list[dict[str, Any]]:
    """What the engine is told of below the host's /tmp, of which it sees nothing else."""
    tops = {Path(*Path(path).parts[:3]) for path in _paths(named) if path.startswith("/tmp/")}
    return [_bind(str(top), str(top), "ro") for top in sorted(tops) if top.is_dir()]


def _paths(named: Iterable[str]) -> list[str]:
    return [found[1] for word in named if (found := _NAMED.search(word))]


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in lines]


def _kernel_mounts() -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
    ]


def _bind(source: str, destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["bind", *options]}


def _own(private: Path, uid: int, gid: int) -> None:
    """The engine's account writes to its private folders."""
    if uid or gid:
        for path in (private, *private.iterdir()):
            os.chown(path, uid, gid)
