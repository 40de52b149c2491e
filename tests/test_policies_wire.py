"""The store's contract: keys that cannot clash, records that survive their codec."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from policies import tasks, wire
from policies.replica import Replica, Stage
from policies.tasks import Progress, Task
from policies.wire import (
    Failure,
    GatewayReport,
    Held,
    Hint,
    HostReport,
    Job,
    Keys,
    ModelLoad,
    Operation,
    Replaced,
    SnapshotSummary,
    Waiting,
)

RECORDS: list[type[BaseModel]] = [Failure, GatewayReport, Held, Hint, HostReport, Job, ModelLoad, Operation, Replica]
RECORDS += [Replaced, SnapshotSummary, Waiting, Progress, Task]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def test_every_record_is_in_this_test() -> None:
    classes = [*inspect.getmembers(wire, inspect.isclass), *inspect.getmembers(tasks, inspect.isclass)]
    found = {value for name, value in classes if issubclass(value, BaseModel) and not name.startswith("_")}
    assert found - {BaseModel, Stage} == set(RECORDS)


@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_record_survives_its_codec(record: type[BaseModel], data: st.DataObject) -> None:
    st.register_type_strategy(str, TEXT)
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    value = data.draw(st.builds(record))
    assert record.model_validate_json(value.model_dump_json()) == value


@pytest.mark.parametrize("record", RECORDS)
def test_a_field_of_a_later_version_is_ignored_and_records_are_frozen(record: type[BaseModel]) -> None:
    assert record.model_config.get("extra", "ignore") == "ignore"
    assert record.model_config["frozen"] is True


def every_key(keys: Keys) -> list[str]:
    fixed = [value for name, value in vars(keys).items() if name != "prefix"]
    made = [getattr(keys, name)("x") for name, _ in inspect.getmembers(Keys, inspect.isfunction) if not name.startswith("_")]
    return fixed + made


def test_keys_begin_with_the_namespace_and_no_two_are_the_same() -> None:
    keys = every_key(Keys("a"))
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("a:") for key in keys)
    assert not set(keys) & set(every_key(Keys("b")))


def test_a_model_may_be_called_like_anything() -> None:
    keys = Keys("rewake")
    names = ["s", "replicas", "jobs", "x:y", "host", "é"]
    made = [key(name) for name in names for key in (keys.starts, keys.failure, keys.active)]
    fixed = {value for name, value in vars(keys).items() if name != "prefix"}
    assert len(set(made)) == len(made)
    assert not set(made) & fixed


@settings(deadline=None)
@given(st.builds(ModelLoad, held=st.integers(0, 9), inflight=st.integers(0, 9), rejected=st.integers(0, 9)))
def test_demand_is_everything_that_waits_runs_or_was_turned_away(load: ModelLoad) -> None:
    assert load.demand == load.held + load.inflight + load.rejected


def test_restore_case_77_every_start_is_labelled() -> None:
    replica = Replica(id="m#0", model="m", state="admitted", fence=1, start="cold", reason="no snapshot fits")
    again = Replica.model_validate_json(replica.model_dump_json())
    assert (again.start, again.reason) == ("cold", "no snapshot fits")
    with pytest.raises(ValueError, match="'restored', 'resumed', 'woken' or 'cold'"):
        Replica(id="m#0", model="m", state="admitted", fence=1, start="warm")
