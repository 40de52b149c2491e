"""``python -m grafana.write``: writes ``dashboards/*.json`` out of the code, and the alert rules once more as Kubernetes takes
them; with ``--check`` it only says which are stale.

Which dashboards there are stands here; what is on them is the other modules'.
"""

from __future__ import annotations

import sys
import textwrap
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
ROOT = Path(__file__).parents[1]
_RULE = """# Made of grafana/alerts.yaml by `make dashboards`: mend it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: rewake}
spec:
"""


def files() -> Mapping[str, str]:
    """Path within the project -> what it shall hold."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    boards = {f"grafana/dashboards/{name}.json": encoder.encode(made()) + "\n" for name, made in BOARDS.items()}
    alerts = (ROOT / "grafana/alerts.yaml").read_text()
    return {**boards, "deploy/kubernetes/monitoring/rules.yaml": _RULE + textwrap.indent(alerts, "  ")}


def stale() -> list[str]:
    """Files that are not what the code says, by their paths."""
    wanted = files()
    there = {*wanted, *(str(path.relative_to(ROOT)) for path in ROOT.glob("grafana/dashboards/*.json"))}
    return sorted(path for path in there if not (ROOT / path).exists() or (ROOT / path).read_text() != wanted.get(path))


def main() -> int:
    """Write, or check."""
    changed = stale()
    if "--check" in sys.argv:
        print("\n".join(f"{path} is stale: run `make dashboards`" for path in changed))
        return bool(changed)
    wanted = files()
    for path in changed:
        (ROOT / path).parent.mkdir(exist_ok=True)
        if path in wanted:
            (ROOT / path).write_text(wanted[path])
        else:
            (ROOT / path).unlink()
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
