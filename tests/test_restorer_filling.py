"""Filling memory: what it takes of the restorer's own, and files in memory, which CRIU fills itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 150 << 20


def test_a_restorer_stays_small_however_large_a_snapshot_is(tmp_path: Path) -> None:
    """A real process, 20 GiB of memory of which 384 MiB are not zero: taken out, looked for in the page cache, put back."""
    argv = [sys.executable, str(ROOT / "tests/e2e_big_memory.py"), str(tmp_path), "20", "384"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    peak, filled = map(int, done.stdout.split())
    assert filled == 384 << 20
    assert peak < MOST, f"{peak / 1e6:.0f} MB"
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert taken < 400 << 20, "holes were expanded"
