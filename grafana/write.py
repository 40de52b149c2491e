"""``python -m grafana.write``: writes ``dashboards/*.json`` out of the code; with ``--check`` it only says which are stale.

Which dashboards there are stands here; what is on them is the other modules'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana import boards, hosts

BOARDS: Mapping[str, Callable[[], Any]] = {
    "fleet": boards.fleet,
    "model": boards.model,
    "restore": hosts.restore,
    "snapshots": hosts.snapshots,
    "tenants": boards.tenants,
    "gpu": hosts.gpu,
}
"""By the name of the file."""
FOLDER = Path(__file__).parent / "dashboards"


def files() -> Mapping[str, str]:
    """Name -> what it shall hold."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{name}.json": encoder.encode(made()) + "\n" for name, made in BOARDS.items()}


def stale() -> list[str]:
    """Names of files that are not what the code says."""
    wanted, there = files(), {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    return sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))


def main() -> int:
    """Write, or check."""
    changed = stale()
    if "--check" in sys.argv:
        print("\n".join(f"grafana/dashboards/{name} is stale: run `make dashboards`" for name in changed))
        return bool(changed)
    FOLDER.mkdir(exist_ok=True)
    wanted = files()
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name])
        else:
            (FOLDER / name).unlink()
        print(f"grafana/dashboards/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
