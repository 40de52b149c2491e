"""A whole Debian with systemd as its pid 1, in namespaces of its own: installed into, booted, asked, stopped.

Made with mmdebstrap and systemd-nspawn. It has the host's network while something is installed, and none while it is booted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "systemd,systemd-sysv,dbus,procps,python3,ca-certificates,curl"
_BOOT_S = 120.0
_COMMAND_S = 3600.0
"""Compiling is among them, on a machine that may be busy."""
_ENVIRONMENT = {
    # The restorer's CRIU must be under no filter, and boxes want to write their own /proc/sys.
    "SYSTEMD_SECCOMP": "0",
    "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1",
}
_PIP = ("/etc/pip.conf", "/etc/xdg/pip", "/opt/pypi", "/opt/wheels")
"""Where this host's pip has its settings, if it has any."""


def archive(suite: str, folder: Path) -> Path:
    """A tar of a fresh system of that release; made once."""
    made = folder / f"{suite}-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}.tar"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{suite}.{os.getpid()}.tar"
        subprocess.run(["mmdebstrap", "--variant=apt", f"--include={PACKAGES}", suite, partial], check=True, timeout=900)
        partial.rename(made)
    return made


class System:
    """One of them.

    Args:
        binds: folders of the host that are there too, read-only.
    """

    def __init__(self, root: Path, binds: dict[Path, str]) -> None:
        self.root = root
        self._binds = [f"--bind-ro={path}:{place}" for path, place in binds.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    @classmethod
    def unpacked(cls, tar: Path, root: Path, binds: dict[Path, str]) -> System:
        root.mkdir()
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-xf", tar], check=True, timeout=300)
        # A mirror may be older than its own signatures are valid; the host knows about its own.
        asked = subprocess.run(["apt-config", "dump", "Acquire::Check-Valid-Until"], capture_output=True, text=True, check=True)
        (root / "etc/apt/apt.conf.d/99host").write_text(asked.stdout)
        return cls(root, binds)

    def _argv(self, *more: str) -> list[str]:
        return ["systemd-nspawn", "--quiet", "-D", str(self.root), "--register=no", "--keep-unit", "--capability=all", *more]

    def install(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the host's network, while it is not booted."""
        pip = [f"--bind-ro={path}" for path in _PIP if Path(path).exists()]
        certificates = "/etc/ssl/certs/ca-certificates.crt"
        pip += [f"--bind-ro={certificates}:/etc/ssl/host.crt", "--setenv=PIP_CERT=/etc/ssl/host.crt"]
        argv = self._argv(*self._binds, *pip, "--resolv-conf=copy-host", "--pipe", "/bin/bash", "-c", command)
        environ = os.environ | _ENVIRONMENT
        return subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, env=environ, check=False)

    @contextlib.contextmanager
    def booted(self) -> Iterator[System]:
        """Until the end of the block."""
        log = (self.root.parent / f"{self.root.name}.boot.log").open("ab")
        # Releases after Debian 12 want to be told, where the host's cgroups are of the older kind.
        legacy = "--setenv=SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"
        argv = self._argv(*self._binds, "--private-network", legacy, "--boot", "--console=read-only")
        environ = os.environ | _ENVIRONMENT
        with log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            deadline = time.monotonic() + _BOOT_S
            while not self._is_up():
                assert self._process.poll() is None, Path(log.name).read_text(errors="replace")
                assert time.monotonic() < deadline, Path(log.name).read_text(errors="replace")
                time.sleep(0.2)
            self.run("ip link set lo up")
            yield self
        finally:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _is_up(self) -> bool:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return False
        self._first = int(children[0])
        return self.run("systemctl is-system-running").stdout.strip() in ("running", "degraded")

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it while it is booted."""
        argv = ["nsenter", "-t", str(self._first), "-a", "/bin/bash", "-c", command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL)

    def must(self, command: str) -> str:
        """Run a command that has to succeed; what it printed."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def journal(self, unit: str) -> str:
        return self.run(f"journalctl --no-pager -o cat -u {shlex.quote(unit)} -n 60").stdout

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
