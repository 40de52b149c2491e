"""Dashboards, alerts and runbooks are what the code says, ask for series that exist, and belong together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from e2e_installation import ROOT
from fake_replica import serving
from prometheus import promtool, questions, shortened

from gateway.hosts import Hosts
from gateway.metrics import Metrics
from grafana import write

GRAFANA, RUNBOOKS = ROOT / "grafana", ROOT / "docs/runbooks"
RULES = [rule for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
SECTIONS = re.findall(r"^## .*", (RUNBOOKS / "template.md").read_text(), re.MULTILINE)


def known() -> set[str]:
    """Every series that a gateway shows, as Prometheus names them."""
    page = Metrics(["m"], version="0").expose(more=[Hosts(None)]).body.decode()
    families = dict(re.findall(r"^# TYPE (rewake_\w+) (\w+)$", page, re.MULTILINE))
    parts = {f"{name}_{part}" for name, kind in families.items() if kind == "histogram" for part in ("bucket", "sum", "count")}
    return {name for name, kind in families.items() if kind != "histogram"} | parts


@pytest.mark.parametrize("file", write.files())
def test_a_dashboard_is_what_the_code_says(file: str) -> None:
    assert file not in write.stale(), f"grafana/dashboards/{file} is stale: run `make dashboards`"


def test_no_dashboard_is_left_over() -> None:
    assert write.stale() == []


@pytest.mark.parametrize("file", sorted((GRAFANA / "dashboards").glob("*.json")), ids=lambda file: file.stem)
def test_a_dashboard_is_whole(file: Path) -> None:
    """No panel overlaps another or has none to ask; every one says what it shows; every variable is defined."""
    board = json.loads(file.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    places = [(panel["gridPos"][side]) for panel in panels for side in ("x", "y", "w", "h")]
    cells = [
        (x, y)
        for left, top, wide, high in zip(*[iter(places)] * 4, strict=True)
        for x in range(left, left + wide)
        for y in range(top, top + high)
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] and panel["title"] and panel["targets"] for panel in panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", "".join(target["expr"] for panel in panels for target in panel["targets"]))) <= variables
    assert board["uid"] == f"rewake-{file.stem}"


def test_dashboards_and_alerts_ask_for_series_that_exist() -> None:
    asked = " ".join([*(expression for _, _, expression in questions()), *(rule["expr"] for rule in RULES)])
    assert set(re.findall(r"\brewake_\w+", asked)) <= known()


def test_dashboards_show_nearly_all_there_is() -> None:
    shown = set(re.findall(r"\brewake_\w+", " ".join(expression for _, _, expression in questions())))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known()}
    left_out = families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert left_out == {
        "rewake_certificate_expires_at_timestamp_seconds",
        "rewake_config_last_reload_success_timestamp_seconds",
        "rewake_host_capable",
        "rewake_host_replicas",
        "rewake_restorer_start_timestamp_seconds",
    }


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    checked = promtool("check", "rules", "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = promtool("test", "rules", "alerts_test.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_runbook_that_is_in_the_index(rule: dict) -> None:
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    page = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    assert re.findall(r"^## .*", page, re.MULTILINE) == SECTIONS
    series = set(re.findall(r"\brewake_\w+", page))
    assert series <= known() | {re.sub(r"_(bucket|sum|count)$", "", name) for name in known()}
    assert f"({rule['alert']}.md)" in (RUNBOOKS / "index.md").read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_no_runbook_is_about_an_alert_that_there_is_no_more() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"index", "template"}
    assert pages == {rule["alert"] for rule in RULES}


def test_the_tests_rules_are_the_projects_but_for_their_times() -> None:
    rules = (GRAFANA / "alerts.yaml").read_text()
    assert re.sub(r"\d+[smh]\b", "", shortened(rules)) == re.sub(r"\d+[smh]\b", "", rules)


def test_provisioning_finds_what_is_there() -> None:
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/rewake.yaml").read_text())["providers"][0]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    readme = (GRAFANA / "README.md").read_text()
    assert provider["options"]["path"] in readme
    assert source["url"].removeprefix("$") in readme


async def test_what_is_scraped_is_as_promtool_wants_it(store: object, store_server: str) -> None:
    async with serving(store_server) as served:
        await served.chat("nobody")
        page = (await served.client.get("/metrics")).text
    checked = promtool("check", "metrics", input=page)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
