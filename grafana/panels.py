"""What the dashboards are made of: a panel is its title, what it asks Prometheus, and what that is a measure of.

Two kinds of series are asked for in two ways. Gateways count their own, so they are added up. What hosts count is shown by every
gateway, so it is taken once, whoever was scraped: :func:`once`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import barchart, bargauge, common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models.common import StackingMode, TooltipDisplayMode, VizOrientation
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, DataTransformerConfig, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "rewake"
RATE = "$__rate_interval"
_WIDTH, _HEIGHT, _SMALL = 8, 8, 4


MODEL, HOST, TENANT = 'model=~"$model"', 'host=~"$host"', 'tenant=~"$tenant"'
"""What the variables of a dashboard choose."""


def of(series: str, *matchers: str) -> str:
    """A series of ours, as far as its labels match."""
    return f"rewake_{series}{{{', '.join(matchers)}}}" if matchers else f"rewake_{series}"


def rate(series: str, *matchers: str) -> str:
    return f"rate({of(series, *matchers)}[{RATE}])"


def once(inner: str) -> str:
    """What hosts count, whoever showed it."""
    return f"max without (instance, job, pod, namespace, endpoint, container, service) ({inner})"


def total(inner: str, by: str = "") -> str:
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def most(inner: str, by: str) -> str:
    return f"max by ({by}) ({inner})"


def quantile(q: float, series: str, by: str, *matchers: str) -> str:
    """Of a histogram that gateways count."""
    return f"histogram_quantile({q}, sum by (le, {by}) ({rate(f'{series}_bucket', *matchers)}))"


def mean(series: str, by: str, *matchers: str) -> str:
    """Of a histogram that hosts count, since the installation began: starts are rare."""
    return f"{total(once(of(f'{series}_sum', *matchers)), by)} / {total(once(of(f'{series}_count', *matchers)), by)}"


def or_zero(expression: str) -> str:
    """For what may never have happened: nothing is a number too."""
    return f"{expression} or vector(0)"


class Ask(NamedTuple):
    """One question, and what its answer is called."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel."""

    title: str
    said: str
    """What it shows, and what to make of it."""
    asks: Sequence[Ask]
    kind: str = "lines"
    """``lines``, ``areas``, ``number``, ``bars``, ``states``, ``waterfall``."""
    unit: str = "short"
    least: float | None = 0.0
    width: int = _WIDTH


class Row(NamedTuple):
    title: str
    panels: Sequence[Panel]


def board(uid: str, title: str, said: str, rows: Sequence[Row], variables: Sequence[tuple[str, str]] = ()) -> Any:
    """A dashboard; ``variables``: name, and the query for its values."""
    made = (
        dashboard.Dashboard(f"Rewake / {title}")
        .uid(f"rewake-{uid}")
        .description(said)
        .tags([TAG])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .editable()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(dashboard.DashboardLink("Rewake").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True).keep_time(True))
    )
    for name, query in variables:
        made.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .query(query)
            .datasource(SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for row in rows:
        made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made.with_panel(_built(panel))
    return made.build()


def _built(panel: Panel) -> Any:
    builder = _KINDS[panel.kind](panel)
    instant = panel.kind in ("number", "bars", "waterfall")
    builder.title(panel.title).description(panel.said).datasource(SOURCE).unit(panel.unit).span(panel.width)
    builder.height(_SMALL if panel.kind == "number" else _HEIGHT)
    if panel.least is not None:
        builder.min(panel.least)
    for number, ask in enumerate(panel.asks):
        query = prometheus.Dataquery().expr(ask.expression).ref_id(chr(ord("A") + number)).legend_format(ask.legend or "__auto")
        if instant:
            query.instant()
        else:
            query.range().exemplar("_bucket" in ask.expression)
        if panel.kind == "waterfall":
            query.format(PromQueryFormat.TABLE)
        builder.with_target(query)
    return builder


def _lines(panel: Panel) -> Any:
    return (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(8)
        .span_nulls(False)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )


def _areas(panel: Panel) -> Any:
    return _lines(panel).fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def _number(panel: Panel) -> Any:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _bars(panel: Panel) -> Any:
    return (
        bargauge.Panel().orientation(VizOrientation.HORIZONTAL).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _states(panel: Panel) -> Any:
    return statetimeline.Panel().merge_values(True)


def _waterfall(panel: Panel) -> Any:
    """Rows by how an engine was started, its stages one behind the other."""
    return (
        barchart.Panel()
        .orientation(VizOrientation.HORIZONTAL)
        .stacking(StackingMode.NORMAL)
        .x_field("start\\stage")
        .with_transformation(
            DataTransformerConfig(
                id_val="groupingToMatrix", options={"rowField": "start", "columnField": "stage", "valueField": "Value"}
            )
        )
    )


_KINDS = {
    "lines": _lines,
    "areas": _areas,
    "number": _number,
    "bars": _bars,
    "states": _states,
    "waterfall": _waterfall,
}
