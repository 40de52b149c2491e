"""A real Prometheus that scrapes one target every second, under the project's rules with their times shortened."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from e2e_installation import ROOT, eventually, needed

WINDOW_S = 20
"""What ranges of minutes and hours become; long enough to be seen, short enough to be over."""


def promtool(*arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """Run it in the folder of the rules; it comes with Prometheus."""
    argv = [str(Path(needed("REWAKE_PROMETHEUS")).with_name("promtool")), *arguments]
    folder = ROOT / "grafana"
    return subprocess.run(argv, input=input, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


def shortened(rules: str) -> str:
    """The rules as they are, but for how long something has to be so."""
    rules = re.sub(r"\[\d+[mh]\]", f"[{WINDOW_S}s]", rules)
    rules = re.sub(r"offset \d+[mh]", f"offset {WINDOW_S}s", rules)
    return re.sub(r"for: \d+[smh]", "for: 1s", rules)


class Prometheus:
    """Its API."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=f"{self.base}/api/v1", timeout=20, trust_env=False)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.base}/-/ready", trust_env=False).status_code == 200
        return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.http.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """Samples now."""
        return list(self.get("query", query=expression)["result"])

    def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Until the block ends."""
    program = needed("REWAKE_PROMETHEUS")
    (folder / "alerts.yaml").write_text(shortened((ROOT / "grafana/alerts.yaml").read_text()))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "rewake", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    argv += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    found = Prometheus(port)
    try:
        eventually(found.ready, f"Prometheus; see {folder / 'prometheus.log'}", 30)
        yield found
    finally:
        found.http.close()
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def questions(folder: Path = ROOT / "grafana/dashboards") -> list[tuple[str, str, str]]:
    """Dashboard, panel, expression with its variables filled in, of every question of every panel."""
    found = []
    for file in sorted(folder.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                asked = target["expr"].replace("$__rate_interval", "1m")
                found.append((file.stem, panel["title"], re.sub(r"\$\w+", ".*", asked)))
    return found
