"""The GPU helper, with the driver's version changed in what it reports: for the bench, which must be refused by it.

Usage: other_driver.py      (as ``restorer.gpu_helper``)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from restorer import cuda_helper
from restorer.cuda_driver import choose


def main() -> None:
    driver: Any = choose()
    facts = driver.facts
    driver.facts = lambda: json.loads(json.dumps(facts())) | {"driver": "999.99"}
    cuda_helper.serve(driver)


if __name__ == "__main__":
    main()
