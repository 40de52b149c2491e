"""Builds the gateway without its metrics, compiled as `make compiled` does it: what observing costs is measured against this.

Usage: unobserved.py FOLDER

The sources with nothing left in the methods that count, compiled into FOLDER/lib. A build of its own, since what is compiled
cannot be changed while it runs. Access log and tracing are switched off in the configuration.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "gateway", "restorer")
COUNT = frozenset(("account", "first_byte", "waited", "promised", "flush", "observe", "observe_tenants", "bounded"))


def emptied(source: str) -> str:
    """The module without what those methods of ``Metrics`` do."""
    tree = ast.parse(source)
    metrics = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Metrics")
    methods = {node.name: node for node in metrics.body if isinstance(node, ast.FunctionDef)}
    for name in COUNT:
        methods[name].body = [ast.Pass()]
    return ast.unparse(tree)


def build(folder: Path) -> None:
    sources = folder / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("rewake.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    metrics = sources / "gateway" / "metrics.py"
    metrics.write_text(emptied(metrics.read_text()))
    argv = [sys.executable, "setup.py", "--quiet", "build", "--build-base", "made", "--build-lib", str(folder / "lib")]
    subprocess.run(argv, cwd=sources, env=os.environ | {"REWAKE_COMPILE": "1"}, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
