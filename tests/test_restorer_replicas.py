"""Records of replicas that have ended while nobody could write so, against a real store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from policies.replica import Replica, State
from restorer.jobs import JobStore
from restorer.replicas import Replicas

pytestmark = pytest.mark.contract


async def test_an_admitted_record_without_an_engine_is_ended_at_the_second_look(store: Any, store_server: str) -> None:
    """The engine died while the store was away, or the answer to the write that admitted it was lost."""
    jobs = JobStore(store_server, "rewake", "host-a")
    replicas = Replicas(SimpleNamespace(name="host-a", jobs=jobs))  # type: ignore[arg-type]
    common: dict[str, Any] = {"model": "m", "state": State.ADMITTED, "fence": 1}
    await jobs.write(Replica(id="m#0", host="host-a", incarnation="gone", **common))
    await jobs.write(Replica(id="m#1", host="host-b", incarnation="elsewhere", **common))
    await replicas.repeat_records()
    assert (await jobs.replicas())["m#0"].state is State.ADMITTED
    await replicas.repeat_records()
    records = await jobs.replicas()
    assert (records["m#0"].state, records["m#0"].reason) == (State.FAILED, "its engine has ended")
    assert records["m#1"].state is State.ADMITTED
    await jobs.close()
