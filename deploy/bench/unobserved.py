"""The gateway without its metrics, for one contender of ``bench-gateway``: what observing costs is measured against this.

Usage: as ``python -m gateway``. Its access log and its tracing are switched off in the configuration that it is given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gateway.__main__ import main
from gateway.metrics import Metrics


def _nothing(*_: Any) -> None: ...


for _name in ("account", "first_byte", "waited", "promised", "flush", "observe", "observe_tenants", "bounded"):
    setattr(Metrics, _name, _nothing)

if __name__ == "__main__":
    sys.exit(main())
