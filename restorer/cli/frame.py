"""Everything at a glance as one picture for a terminal: what ``rewake top`` draws, of the same document as the console.

Fits the width that it is given: what matters least is left out first. Knows nothing of keys, time passing, or the admin API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from restorer.cli.console import size

Document: TypeAlias = Mapping[str, Any]
_LOOKS = {
    "ready": "green",
    "admitted": "green",
    "succeeded": "green",
    "failed": "bold red",
    "quarantined": "bold red",
    "cold": "dim",
    "stopped": "dim",
    "cancelled": "dim",
}
"""States not named here are on their way to another."""
_MARKS = {
    "ready": "●",
    "admitted": "●",
    "succeeded": "●",
    "failed": "▲",
    "quarantined": "▲",
    "cold": "○",
    "stopped": "○",
    "cancelled": "○",
}
_BAR, _SHORT_BAR = 28, 12
_NARROW, _WIDE = 72, 110
_HELD, _REPLICAS, _OPERATIONS = 8, 20, 6
_LEAST = 12
_PREAMBLE = re.compile(r"\b(criu \w+ failed) with status -?\d+: (?:\d+: )?Error \([^)]*\): ")
"""Where in CRIU's sources the line comes from; what it says is worth the room."""


def frame(document: Document, width: int, now_ms: float, notice: str = "") -> RenderableType:
    """One picture of an overview for a terminal of this width."""
    parts: list[RenderableType] = [_headline(document, notice)]
    parts += _wrong(document)
    for title, table in (
        ("MODELS", _models(document, width)),
        ("UNDER WAY", _under_way(document, width)),
        ("HELD", _held(document, width)),
        ("REPLICAS", _replicas(document, width, now_ms)),
        ("OPERATIONS", _operations(document, width, now_ms)),
        ("HOSTS", _hosts(document)),
    ):
        if table is not None:
            parts += [Text(""), Text(title, style="bold dim"), table]
    return Group(*parts)


def _headline(document: Document, notice: str) -> Text:
    models = document["models"]
    ready = sum(model["state"] == "ready" for model in models)
    held, inflight = sum(model["held"] for model in models), sum(model["inflight"] for model in models)
    gateways = document["gateways"]
    line = Text.assemble(
        ("rewake", "bold"),
        f"  {ready} of {len(models)} models ready · {inflight} in flight · {held} held · ",
        f"{gateways} gateway{'s' * (gateways != 1)} · {len(document['hosts'])} host{'s' * (len(document['hosts']) != 1)}",
    )
    if notice:
        line.append(f"  {notice}", style="bold yellow")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _wrong(document: Document) -> list[RenderableType]:
    lines = []
    if not document["store"]:
        lines.append("the store is not reached: serving goes on, nothing can be started")
    if not document["hosts"]:
        lines.append("no restorer reports: nothing can be started")
    lines += [f"{host['host']} makes cold starts only: {host['capability']}" for host in document["hosts"] if not host["capable"]]
    failed = {m["name"]: m["failure"] for m in document["models"] if m["failure"]}
    lines += [f"{name} (rewake why {name}): {_said(document, name) or why}" for name, why in failed.items()]
    for one in document["replicas"]:
        if one["reason"] and one["model"] not in failed and _is_wrong(one):
            lines.append(f"{one['id']} {_outcome(one)} (rewake why {one['id']}): {brief(one['reason'])}")
    return [Text(f"▲ {line}", style="bold red", no_wrap=True, overflow="ellipsis") for line in lines]


def _is_wrong(replica: Document) -> bool:
    """It has failed, or is here by a cold start after a restore that failed."""
    cold = replica["state"] == "admitted" and replica["start"] == "cold" and "failed" in replica["reason"]
    return cold or replica["state"] in ("failed", "quarantined")


def _outcome(replica: Document) -> str:
    return "was started cold" if replica["state"] == "admitted" else str(replica["state"])


def _said(document: Document, model: str) -> str:
    """The line that decided, of the model's replica that failed: its record is for the operator."""
    mine = (one for one in document["replicas"] if one["model"] == model and one["state"] == "failed")
    return next((brief(one["reason"]) for one in mine if one["reason"]), "")


def _state(word: str) -> Text:
    return Text(f"{_MARKS.get(word, '◐')} {word}", style=_LOOKS.get(word, "yellow"), no_wrap=True)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for title in titles:
        right = title in ("HELD", "INFLIGHT", "REPLICAS", "READY IN", "POSITION", "WAITED", "SERVED IN", "SIZE")
        table.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """A table whose last column takes what the others leave of the width: names and states are never cut for its sake."""
    table = _table(*columns)
    taken = sum(max(len(cell) for cell in column) + 2 for column in zip(columns, *rows, strict=True)) if rows else 0
    taken -= max((len(row[-1]) for row in rows), default=0) + 2
    for *cells, last in rows:
        table.add_row(*cells, brief(str(last), max(_LEAST, width - taken)))
    return table


def _add(table: Table, columns: Sequence[str], cells: Mapping[str, str | Text]) -> None:
    table.add_row(*(cells[column] for column in columns))


def _models(document: Document, width: int) -> Table:
    columns = ["MODEL", "STATE", "REPLICAS", "INFLIGHT", "HELD"]
    columns += ["READY IN"] * (width >= _NARROW) + ["ENGINE"] * (width >= _WIDE)
    table = _table(*columns)
    for one in document["models"]:
        eta = "now" if one["state"] == "ready" else "-" if one["eta_s"] is None else seconds(one["eta_s"])
        cells: dict[str, str | Text] = {
            "MODEL": one["name"],
            "STATE": _state(one["state"]),
            "REPLICAS": f"{one['admitted']}/{one['max_replicas']}",
            "INFLIGHT": str(one["inflight"]),
            "HELD": Text(str(one["held"]), style="bold yellow" if one["held"] else ""),
            "READY IN": eta,
            "ENGINE": one["engine"],
        }
        _add(table, columns, cells)
    return table


def _under_way(document: Document, width: int) -> Table | None:
    working = [one for one in document["progress"] if one["what"] != "log"]
    if not working:
        return None
    bar = _BAR if width >= _WIDE else _SHORT_BAR
    table = _table("WHAT", "STAGE", "TIME", *(["BYTES"] if width >= _NARROW else []), "")
    for one in working:
        now_ms = max(one["now_ms"], document["now_ms"])
        total = max(0.001, (now_ms - one["begun_ms"]) / 1000)
        stages = [
            *one["stages"],
            *({**stage, "seconds": (now_ms - stage["begun_ms"]) / 1000, "now": True} for stage in one["doing"]),
        ]
        for number, stage in enumerate(stages):
            what = f"{one['what']} {one['replica'] or one['model'] or one['snapshot']}" if number == 0 else ""
            begun = max(0.0, (stage["begun_ms"] - one["begun_ms"]) / 1000)
            moved = f"{size(stage['bytes'])}{' ' + stage['tier'] if stage['tier'] else ''}" if stage["bytes"] else ""
            style = "bold yellow" if stage.get("now") else "dim"
            row: list[str | Text] = [
                what,
                Text(stage["name"], style=style),
                seconds(stage["seconds"]),
                *([moved] if width >= _NARROW else []),
            ]
            table.add_row(*row, Text(_bar(bar, begun, stage["seconds"], total), style="yellow" if stage.get("now") else "cyan"))
        if one["bytes_total"]:
            table.add_row("", "bytes", "", *([size(one["bytes_done"] or 0)] if width >= _NARROW else []),
                          Text(_bar(bar, 0, one["bytes_done"] or 0, one["bytes_total"]), style="cyan"))  # fmt: skip
    return table


def _bar(width: int, begun: float, length: float, total: float) -> str:
    """Where in the whole it lies; never nothing."""
    start = min(width - 1, int(width * begun / total))
    return " " * start + "━" * max(1, min(width - start, round(width * length / total)))


def _held(document: Document, width: int) -> Table | None:
    if not document["held"]:
        return None
    several = document["gateways"] > 1 and width >= _NARROW
    # Each gateway has a queue of its own.
    table = _table("MODEL", "TENANT", "POSITION", *(["GATEWAY"] if several else []), "WAITED", "SERVED IN")
    for one in document["held"][:_HELD]:
        served = "-" if one["eta_s"] is None else seconds(one["eta_s"])
        place = f"{one['position']} of {one['of']}" if one["of"] else str(one["position"])
        where = [one["gateway"]] if several else []
        table.add_row(one["model"], one["tenant"] or "-", place, *where, seconds(one["waited_s"]), served)
    return table


def _replicas(document: Document, width: int, now_ms: float) -> Table | None:
    if not document["replicas"]:
        return None
    columns = ["REPLICA", "STATE", "START", "INFLIGHT", "SINCE"]
    columns += ["HOST"] * (width >= _NARROW) + ["INCARNATION"] * (width >= _WIDE)
    columns += ["REASON"] * (width >= _NARROW)
    rows = []
    order = sorted(document["replicas"], key=lambda one: (one["state"] in ("stopped", "cancelled"), one["id"]))
    for one in order[:_REPLICAS]:
        cells: dict[str, str | Text] = {
            "REPLICA": one["id"],
            "STATE": _state(one["state"]),
            "START": one["start"] or "-",
            "INFLIGHT": str(one["inflight"]),
            "SINCE": ago(one["updated_ms"], now_ms),
            "HOST": one["host"] or "-",
            "INCARNATION": one["incarnation"] or "-",
            "REASON": brief(one["reason"]),
        }
        rows.append([cells[column] for column in columns])
    return _filled(columns, rows, width)


def _operations(document: Document, width: int, now_ms: float) -> Table | None:
    found = [*document["operations"], *document["tasks"]]
    if not found or width < _NARROW:
        return None
    rows = []
    for one in sorted(found, key=lambda one: -one["created_ms"])[:_OPERATIONS]:
        what = f"{one['kind'].replace('_', '-')} {one['model'] or one.get('snapshot') or one.get('replica', '')}"
        outcome = brief(one["detail"]) or one.get("snapshot") or ""
        rows.append([what, _state(one["state"]), ago(one["created_ms"], now_ms), outcome])
    return _filled(("OPERATION", "STATE", "BEGUN", "OUTCOME"), rows, width)


def _hosts(document: Document) -> Table | None:
    if not document["hosts"]:
        return None
    table = _table("HOST", "RUNNING", "SNAPSHOTS", "SIZE", "CRIU")
    for one in document["hosts"]:
        held = one["snapshots"]
        fits = sum(snapshot["fits"] for snapshot in held)
        bytes_ = size(sum(snapshot["bytes"] for snapshot in held))
        table.add_row(one["host"], str(one["running"]), f"{fits} of {len(held)} fit", bytes_, "works" if one["capable"] else "-")
    return table


def seconds(value: float) -> str:
    """A duration, for people."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else f"{int(value // 60)} min {int(value % 60)} s"


def ago(ms: int, now_ms: float) -> str:
    """How long ago, in one unit."""
    gone = max(0.0, (now_ms - ms) / 1000)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if gone >= length:
            return f"{int(gone // length)} {unit}"
    return f"{int(gone)} s"


def brief(text: str, most: int = 80) -> str:
    """The cause in one short line; the whole of it is ``rewake why``'s."""
    first = _PREAMBLE.sub(r"\1: ", text.split("\n", 1)[0].partition("; its log ends: ")[0].strip())
    return first if len(first) <= most else first[: most - 1] + "…"
