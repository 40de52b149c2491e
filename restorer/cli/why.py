"""``rewake why``: from a failed restore to its cause in one screen; and the short cause that ``rewake ps`` shows.

Prints what the admin API tells (:mod:`policies.story`); decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from pydantic import ValidationError

from policies.story import Story, Try
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import print_json, print_table, short_hashes, when
from restorer.cli.frame import brief, seconds
from restorer.cli.operator import Admin, Failed, load

_CAUSE = 160
_LINE = 240
_UNFIT = 2
"""Snapshots whose reasons are shown: the whole is to fit on a screen."""
_FAULTS = {
    "host": "this host's doing: another may do",
    "snapshot": "the snapshot's own fault",
    "transient": "the moment's, as far as is known",
    "tool": "a tool failed",
    "environment": "this host lacks something just now",
    "cancelled": "nobody wanted it any more",
}


def why(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model, a replica (model#slot), or an incarnation.")],
    config: ConfigFile = None,
    json_: AsJson = False,
) -> None:
    """Say why a model or a replica is not what it should be: what failed, the line that says so, what mends it."""
    with Admin(load(config)[1]) as admin:
        document = admin.why(name)
    if json_:
        return print_json(document)
    try:
        told = Story.model_validate(document)
    except ValidationError as error:
        raise Failed(f"the gateway is of another version: {str(error).splitlines()[0]}") from None
    for line in _lines(told):
        print(line)
    if told.replicas:
        rows = [[one.id, one.state, one.start or "-", one.snapshot or "-", when(one.updated_ms)] for one in told.replicas]
        print()
        print_table(["REPLICA", "STATE", "START", "SNAPSHOT", "SINCE"], rows)


def _lines(told: Story) -> Iterator[str]:
    stuck = [*_stuck(told)]
    clean = not (told.brief or told.unfit or told.tries or stuck)
    yield f"{told.model} is {told.state}" + (": nothing is on record against it" if clean else "")
    now = [one for one in told.tries if not one.past]
    reasons = [f"{one.id}: {one.reason}" for one in told.replicas if one.reason]
    if now:
        yield from _attempt(now[0])
    elif reasons:
        yield from reasons
    elif told.brief:
        yield f"  {told.brief}"
    yield from stuck
    if told.next_try_s is not None:
        yield f"not tried again by itself for another {seconds(told.next_try_s)}; `rewake scale` tries at once"
    for one in told.tries[bool(now) :]:
        yield f"before that, {when(one.at_ms)} on {one.host}, {one.step}: {brief(one.quote, 200)}"
    for unfit in told.unfit[:_UNFIT]:
        yield f"snapshot {unfit.id} on {unfit.host} is not used:"
        yield from (f"    {_middle_cut(short_hashes(line))}" for line in unfit.reason.splitlines())
    if more := len(told.unfit[_UNFIT:]):
        yield f"nor {'is 1 other' if more == 1 else f'are {more} others'}"
    if told.unfit:
        yield f"every fact, and which hosts would do: rewake snapshot explain {told.model}"


def _middle_cut(line: str) -> str:
    """Its beginning, which names the fact, and its end, which is the remedy."""
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} … {line[-_LINE // 2 :]}"


def _stuck(told: Story) -> Iterator[str]:
    """Why nothing can start it now."""
    if not told.hosts:
        yield "no restorer reports, so nothing can be started: is `rewake restorer`, or `rewake up`, running?"
    if told.lacking:
        yield f"no host that reports can start {told.model}:"
        yield from (f"    {host}: {what}" for host, what in told.lacking.items())


def _attempt(one: Try) -> Iterator[str]:
    """The last one, whole."""
    then = "; it was then started cold" if one.outcome == "succeeded" else ""
    yield f"{one.kind} of {one.replica or 'a donor'} failed {one.step}, on {one.host}, {when(one.at_ms)}{then}:"
    yield ""
    yield f"    {one.quote}"
    yield ""
    if one.remedy:
        yield f"to mend it: {one.remedy}"
    if one.fault:
        yield f"whose fault: {_FAULTS.get(one.fault, one.fault)}"
    said = [line for line in one.said.splitlines() if line.strip() and line.strip() not in one.quote]
    # What only says once more what is quoted above is not worth its lines.
    if any(not line.endswith(one.quote) for line in said):
        yield "all that was said:"
        yield from (f"    {line}" for line in said[:20])
    yield f"every step: rewake journal {one.id}" + (f"; its log: rewake logs '{one.replica}'" if one.logged else "")


def cause(reason: str) -> str:
    """A record's reason as it fits into a table."""
    return brief(reason, _CAUSE)
