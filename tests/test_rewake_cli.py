"""The command line against a scripted admin API and a real snapshot store: output, messages, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from conftest import require_root
from processes import opened_up, owned

import rewake
from policies.config import parse
from policies.manifest import Exchange, HostFacts, Manifest, MappedFile, Profile
from policies.replica import Replica, State
from policies.verdicts import Note
from policies.wire import Operation, OperationState
from restorer.cli import logs_command, operator
from restorer.installation import rundir
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps

ROOT = Path(__file__).parents[1]
TOKEN = "t" * 43


class AdminApi:
    """What the gateway's admin API would say."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.replicas: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.states: list[OperationState] = [OperationState.RUNNING, OperationState.RUNNING, OperationState.SUCCEEDED]
        self.ended: dict[str, Any] = {}
        self.refusal: web.Response | None = None
        self.waits: list[float] = []
        self.tasks: list[dict[str, Any]] = []
        """What a task is, each time that somebody looks."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authorized])
        app.router.add_get("/admin/v1/replicas", self._replicas)
        app.router.add_get("/admin/v1/operations/{id}", self._operation)
        app.router.add_post("/admin/v1/tasks", self._begin_task)
        app.router.add_get("/admin/v1/tasks/{id}", self._task)
        for verb in ("scale-up", "scale-down", "drain", "snapshots"):
            app.router.add_post(f"/admin/v1/{verb}", self._begin)
        return app

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return failure(401, "The admin API needs a token.")
        return self.refusal or await handler(request)  # type: ignore[no-any-return]

    async def _replicas(self, _: web.Request) -> web.Response:
        return web.json_response({"replicas": self.replicas})

    async def _begin(self, request: web.Request) -> web.Response:
        self.calls.append((request.path.rpartition("/")[2], await request.json()))
        return self._answer(202)

    async def _begin_task(self, request: web.Request) -> web.Response:
        self.calls.append(("tasks", await request.json()))
        return await self._task(request)

    async def _task(self, request: web.Request) -> web.Response:
        return web.json_response({"id": "t1", "detail": "", **self.tasks.pop(0)})

    async def _operation(self, request: web.Request) -> web.Response:
        assert request.match_info["id"] == "op-1"
        self.waits.append(float(request.query["wait"]))
        if len(self.states) > 1:
            self.states.pop(0)
        return self._answer(200)

    def _answer(self, status: int) -> web.Response:
        state = self.states[0]
        more = {} if state == OperationState.RUNNING else self.ended
        operation = Operation(id="op-1", kind="scale_up", model="m", reason="admin", state=state, jobs=("j",), **more)
        return web.json_response(operation.model_dump(mode="json"), status=status)


def failure(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": "y"}}, status=status)


def replica(slot: int, state: State, **more: Any) -> dict[str, Any]:
    record = Replica(id=f"m#{slot}", model="m", state=state, fence=1, **more)
    return record.model_dump(mode="json") | {"inflight": 0}


class Place:
    """A configuration, its folders, and a way to run a command with it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.config, self._capsys = folder, folder / "rewake.yaml", capsys
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        for made in (self.run_dir, self.state_dir):
            made.mkdir()
        self.write(port=1)
        (self.run_dir / "admin-token").write_text(f"{TOKEN}\n")

    def write(self, *, port: int, **more: Any) -> None:
        model = {"engine": {"kind": "http", "command": ["/bin/true"]}, "aliases": ["alias"], "max_replicas": 3}
        document = {
            "models": {"m": model},
            "gateway": {"port": port},
            "run_dir": str(self.run_dir),
            "state_dir": str(self.state_dir),
        }
        self.config.write_text(yaml.safe_dump(document | more))

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr of one command."""
        code = rewake.main([*words, "-c", str(self.config)])
        out, err = self._capsys.readouterr()
        return code, out, err

    async def call(self, *words: str) -> tuple[int, str, str]:
        """The same beside a server on this loop."""
        return await asyncio.to_thread(self.run, *words)


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


@pytest.fixture
async def api(place: Place) -> AsyncIterator[AdminApi]:
    admin = AdminApi(place)
    async with TestServer(admin.application()) as server:
        place.write(port=server.port)
        yield admin


# ---------------------------------------------------------------- the configuration


def test_no_configuration_is_usage_and_shows_a_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operator, "DEFAULTS", (Path("rewake.yaml"), tmp_path / "etc.yaml"))
    assert rewake.main(["ps"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rewake: no configuration: give one with -c FILE, or write rewake.yaml or {tmp_path}/etc.yaml.")
    assert operator.EXAMPLE in said
    assert parse(yaml.safe_load(operator.EXAMPLE)).models["tiny"].engine.kind == "llama-server"


def test_the_default_places_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operator, "DEFAULTS", (Path("rewake.yaml"), tmp_path / "etc.yaml"))
    (tmp_path / "etc.yaml").write_text(operator.EXAMPLE)
    assert operator.load(None)[0] == tmp_path / "etc.yaml"
    (tmp_path / "rewake.yaml").write_text(operator.EXAMPLE)
    assert operator.load(None)[0] == tmp_path / "rewake.yaml"


@pytest.mark.parametrize("command", [("up",), ("gateway",), ("restorer",), ("doctor",), ("ps",), ("snapshot", "ls")])
def test_every_fault_of_a_configuration_is_listed_with_its_path(place: Place, command: tuple[str, ...]) -> None:
    place.config.write_text(
        yaml.safe_dump({"models": {"m": {"engine": {"kind": "http", "command": ["true"]}, "kep": 1}}, "x": 1})
    )
    code, _, err = place.run(*command)
    assert code == 2
    assert err == (
        f"rewake: {place.config} has faults:\n"
        "models.m.engine.command: 'true' must be an absolute path: engines run with an environment of their own\n"
        "models.m.kep: unknown setting; remove it or mend its spelling\n"
        "x: unknown setting; remove it or mend its spelling\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [", "is not YAML: while parsing"),
        ("", "has faults:\nthe file must be a mapping of settings, but it holds nothing"),
        ("- a", "has faults:\nthe file must be a mapping of settings, but it holds a list"),
    ],
)
def test_a_file_that_is_no_configuration_is_usage(place: Place, text: str, said: str) -> None:
    place.config.write_text(text)
    code, _, err = place.run("ps")
    assert code == 2
    assert said in err


def test_a_file_that_is_not_there_is_usage(place: Place) -> None:
    place.config.unlink()
    assert place.run("up") == (2, "", f"rewake: {place.config}: No such file or directory; give the configuration with -c FILE\n")


def test_a_configuration_that_anybody_can_write_is_refused(place: Place) -> None:
    place.config.chmod(0o666)
    code, _, err = place.run("up")
    assert code == 2
    assert f"chmod o-w {place.config}" in err


def test_root_does_not_trust_a_found_configuration_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_root()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUDO_UID", raising=False)
    path = tmp_path / "rewake.yaml"
    path.write_text(operator.EXAMPLE)
    os.chown(path, 65534, 65534)
    with pytest.raises(operator.Failed, match="belongs to uid 65534: name it with -c"):
        operator.load(None)
    assert operator.load(path)[0] == path
    monkeypatch.setenv("SUDO_UID", "65534")
    assert operator.load(None)[0] == path


@pytest.mark.parametrize("command", ["gateway", "restorer"])
def test_one_process_alone_needs_a_store_url(place: Place, command: str) -> None:
    code, _, err = place.run(command)
    assert code == 2
    assert "store.url is empty; name the Redis" in err


def test_gateway_and_restorer_become_the_processes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Became(Exception):
        pass

    seen: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        seen.append((path, argv, env))
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    place.write(port=1, store={"url": "redis://r"})
    token = place.run_dir / "admin-token"
    for words, more in (
        (["gateway", "--worker", "2"], ["--admin-token-file", str(token), "--worker", "2"]),
        (["restorer"], []),
    ):
        with pytest.raises(Became):
            place.run(*words)
        path, argv, env = seen.pop()
        assert path == sys.executable
        assert argv == [sys.executable, "-P", "-m", words[0], "--config", str(place.config), "--store", "redis://r", *more]
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    # The old token could be read by others: a new one was made.
    assert owned(token) == (0o600, os.geteuid())
    assert token.read_text().strip() != TOKEN


# ---------------------------------------------------------------- the admin API


async def test_ps_lists_replicas_for_people_and_programs(place: Place, api: AdminApi) -> None:
    api.replicas = [
        replica(1, State.FAILED, reason="it [died]"),
        replica(
            0, State.ADMITTED, address="198.18.0.2", port=8000, start="restored", snapshot="ab", incarnation="i0", updated_ms=1000
        )
        | {"inflight": 3},
        replica(2, State.ADMITTED, address="198.18.0.2", port=8000, start="cold", host="b", door="10.0.0.5:20003"),
        replica(3, State.ADMITTED, address="198.18.0.6", port=8000, start="cold", host="c") | {"barred": "it is on c"},
    ]
    code, out, _ = await place.call("ps")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["REPLICA", "STATE", "HOST", "START", "SNAPSHOT", "INFLIGHT", "ADDRESS", "INCARNATION", "SINCE", "REASON"],
        ["m#0", "admitted", "-", "restored", "ab", "3", "198.18.0.2:8000", "i0", "1970-01-01", "00:00:01Z"],
        ["m#1", "failed", "-", "-", "-", "0", "-", "-", "-", "it", "[died]"],
        ["m#2", "admitted", "b", "cold", "-", "0", "10.0.0.5:20003", "-", "-"],
        ["m#3", "admitted", "c", "cold", "-", "0", "198.18.0.6:8000", "-", "-", "it", "is", "on", "c"],
    ]
    code, out, _ = await place.call("ps", "--json")
    assert json.loads(out) == sorted(api.replicas, key=lambda one: one["id"])


@pytest.mark.parametrize(
    ("states", "wanted", "call"),
    [
        ([], 2, ("scale-up", {"model": "m", "replicas": 2})),
        ([State.FAILED, State.STOPPED, State.DRAINING], 1, ("scale-up", {"model": "m", "replicas": 1})),
        ([State.ADMITTED, State.RESTORING], 1, ("scale-down", {"model": "m", "replicas": 1})),
        ([State.ADMITTED], 0, ("scale-down", {"model": "m", "replicas": 0})),
    ],
)
async def test_scale_goes_up_or_down(
    place: Place, api: AdminApi, states: list[State], wanted: int, call: tuple[str, dict[str, Any]]
) -> None:
    api.replicas = [replica(slot, state) for slot, state in enumerate(states)]
    code, out, _ = await place.call("scale", "alias", str(wanted))
    assert code == 0
    assert api.calls == [call]
    assert out.startswith("scale-up of m succeeded after ")


async def test_scale_to_what_there_is_does_nothing(place: Place, api: AdminApi) -> None:
    api.replicas = [replica(0, State.ADMITTED)]
    assert await place.call("scale", "m", "1") == (0, "m has 1 replica already\n", "")
    assert api.calls == []


async def test_scale_shows_what_goes_on(place: Place, api: AdminApi) -> None:
    api.replicas = [replica(0, State.RESTORING)]
    code, _, err = await place.call("scale", "m", "3")
    assert code == 0
    assert err == "scale-up of m: m#0 restoring (0 s)\n"
    assert all(0 < wait <= 60 for wait in api.waits)


async def test_no_wait_prints_the_operation(place: Place, api: AdminApi) -> None:
    assert await place.call("scale", "m", "1", "--no-wait") == (0, "op-1\n", "")
    assert api.waits == []


async def test_waiting_ends_at_its_deadline_and_says_that_the_operation_goes_on(place: Place, api: AdminApi) -> None:
    api.states = [OperationState.RUNNING]
    code, _, err = await place.call("scale", "m", "1", "--timeout", "0")
    assert code == 1
    assert "operation op-1 still runs after 0 s; it goes on by itself" in err


@pytest.mark.parametrize(
    ("state", "ended", "code", "said"),
    [
        (OperationState.SUCCEEDED, {"snapshot": "abcd"}, 0, ", snapshot abcd\n"),
        (OperationState.FAILED, {"code": 1, "detail": "the disk is full"}, 1, ": the disk is full\n"),
        (
            OperationState.FAILED,
            {"code": 3, "detail": "host.kernel: expected 6, found 7"},
            3,
            ": host.kernel: expected 6, found 7\n",
        ),
        (OperationState.FAILED, {}, 1, " s\n"),
        (OperationState.CANCELLED, {"detail": "nobody wants it"}, 1, ": nobody wants it\n"),
    ],
)
async def test_the_exit_code_is_the_operations(
    place: Place, api: AdminApi, state: OperationState, ended: dict[str, Any], code: int, said: str
) -> None:
    api.states, api.ended = [OperationState.RUNNING, state], ended
    got, out, _ = await place.call("snapshot", "create", "m")
    assert got == code
    assert f" {state} after " in out
    assert out.endswith(said)
    assert api.calls == [("snapshots", {"model": "m"})]


@pytest.mark.parametrize("name", ["m#0", "i0"])
async def test_drain_takes_a_slot_or_an_incarnation(place: Place, api: AdminApi, name: str) -> None:
    api.replicas = [replica(0, State.ADMITTED, incarnation="i0")]
    code, _, _ = await place.call("drain", name)
    assert code == 0
    assert api.calls == [("drain", {"replica": "m#0"})]


async def test_names_that_are_not_there_are_usage_and_list_what_is(place: Place, api: AdminApi) -> None:
    api.replicas = [replica(0, State.ADMITTED, incarnation="i0")]
    assert await place.call("drain", "m#7") == (2, "", "rewake: there is no replica 'm#7'; known: m#0\n")
    assert await place.call("scale", "x", "1") == (2, "", "rewake: the configuration has no model 'x'; it has m\n")
    assert await place.call("scale", "m", "4") == (2, "", "rewake: models.m.max_replicas is 3; raise it to run 4\n")


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (lambda: failure(409, "Model 'm' is in use."), 1, "Model 'm' is in use."),
        (lambda: failure(503, "The store does not answer."), 1, "The store does not answer."),
        (lambda: failure(400, "replicas is -1."), 2, "replicas is -1."),
        (lambda: web.Response(text="<html>", status=200), 1, "is no Rewake gateway (HTTP 200); see gateway.port"),
        (lambda: web.json_response({"id": "op-1"}), 1, "is of another version"),
    ],
)
async def test_a_refusal_is_one_line(
    place: Place, api: AdminApi, answer: Callable[[], web.Response], code: int, said: str
) -> None:
    api.replicas = [replica(0, State.ADMITTED)]
    api.refusal = answer()
    got, out, err = await place.call("snapshot", "create", "m")
    assert (got, out) == (code, "")
    assert err.startswith("rewake: ")
    assert said in err
    assert err.count("\n") == 1


async def test_a_wrong_token_says_how_to_mend_it(place: Place, api: AdminApi) -> None:
    (place.run_dir / "admin-token").write_text("x" * 43)
    code, _, err = await place.call("ps")
    assert code == 1
    assert f"does not accept the token in {place.run_dir}/admin-token" in err
    assert "restart it with this configuration" in err


async def test_what_runs_is_reached_although_the_file_names_another_address_by_now(place: Place, api: AdminApi) -> None:
    port = parse(yaml.safe_load(place.config.read_text())).gateway.port
    with rundir.lock(place.run_dir):
        rundir.announce(rundir.Address(url=f"http://127.0.0.1:{port}", run_dir=str(place.run_dir)), place.state_dir)
        place.write(port=1, run_dir=str(place.folder / "moved"))
        assert (await place.call("ps", "--json"))[0] == 0
    # It has ended: now the file is right.
    place.write(port=1)
    code, _, err = await place.call("ps")
    assert (code, "no gateway answers at http://127.0.0.1:1 " in err) == (1, True)


def test_no_gateway_says_where_it_was_looked_for(place: Place) -> None:
    code, _, err = place.run("ps")
    assert code == 1
    assert err.startswith("rewake: no gateway answers at http://127.0.0.1:1 (ConnectError: ")
    assert "is `rewake up` running" in err


def test_no_token_says_what_makes_it(place: Place) -> None:
    (place.run_dir / "admin-token").unlink()
    assert place.run("ps") == (
        1,
        "",
        f"rewake: {place.run_dir}/admin-token is not there: is `rewake up` running with this configuration?\n",
    )


def test_a_token_of_somebody_else_says_who_may_read_it(place: Place) -> None:
    require_root()
    opened_up(place.folder)
    place.config.chmod(0o644)
    (place.run_dir / "admin-token").chmod(0o600)
    ask = f"rewake.main(['ps', '-c', {str(place.config)!r}])"
    # Asked once by root, all that it imports is there: who comes then may be unable to read this folder, or Python's.
    code = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); import rewake; {ask}; os.setgid(65534); os.setuid(65534); "
    code += f"sys.exit({ask})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "may not be read; run this as the user that runs `rewake up`" in ran.stderr


def engine_log(place: Place, incarnation: str) -> Path:
    path = place.state_dir / "boxes" / incarnation / "private" / "engine.log"
    path.parent.mkdir(parents=True)
    return path


async def test_logs_prints_the_end_of_the_incarnations_log(place: Place, api: AdminApi) -> None:
    api.replicas = [replica(0, State.ADMITTED, incarnation="i0"), replica(1, State.QUEUED)]
    path = engine_log(place, "i0")
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(100)))
    assert await place.call("logs", "m#0", "-n", "2") == (0, "line 98\nline 99\n", "")
    assert (await place.call("logs", "m#0"))[1].count("\n") == 50
    assert await place.call("logs", "m#0", "-n", "0") == (0, "", "")
    assert await place.call("logs", "m#1") == (
        1,
        "",
        "rewake: no host has started m#1, so there is no log of it; `rewake why 'm#1'` may know more\n",
    )
    path.unlink()
    assert "engine.log: No such file or directory" in (await place.call("logs", "m#0"))[2]


async def test_logs_of_another_hosts_replica_come_from_its_restorer(place: Place, api: AdminApi) -> None:
    api.replicas = [replica(0, State.ADMITTED, incarnation="i0", host="far")]
    part = {"offset": 7, "running": True, "incarnation": "i0"}
    api.tasks = [
        {"state": "running"},
        {"state": "succeeded", "result": {**part, "text": "one\ntwo\n"}},
        {"state": "succeeded", "result": {**part, "text": "three\n", "running": False}},
    ]
    assert await place.call("logs", "m#0", "-n", "2", "--follow") == (0, "one\ntwo\nthree\n", "")
    asked = [body for verb, body in api.calls if verb == "tasks"]
    common = {"kind": "log", "replica": "m#0", "host": "far"}
    assert asked == [{**common, "lines": 2}, {**common, "offset": 7}]
    api.tasks = [{"state": "failed", "detail": "m#0 has no log on far"}]
    assert await place.call("logs", "m#0") == (1, "", "rewake: m#0 has no log on far\n")


async def test_a_host_that_does_not_answer_is_not_waited_for_without_end(
    place: Place, api: AdminApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_command, "_TASK_S", 0.0)
    api.replicas = [replica(0, State.ADMITTED, incarnation="i0", host="far")]
    api.tasks = [{"state": "running"}] * 100
    code, out, err = await place.call("logs", "m#0")
    assert (code, out) == (1, "")
    assert "the restorer on far has not answered within 0 s" in err


def test_logs_of_an_incarnation_need_no_gateway_and_follow_no_link(place: Place) -> None:
    engine_log(place, "i0").write_text("one\n")
    assert place.run("logs", "i0") == (0, "one\n", "")
    assert place.run("logs", "../i0")[0] == 1
    engine_log(place, "i1").symlink_to(place.config)
    code, out, err = place.run("logs", "i1")
    assert (code, out) == (1, "")
    assert "Too many levels of symbolic links" in err


# ---------------------------------------------------------------- snapshots


def snapshot(place: Place, created_ms: int = 1000, **more: Any) -> Manifest:
    """A real committed snapshot of the place's store."""
    outside = place.folder / "engine-binary"
    outside.write_bytes(b"binary")
    store = SnapshotStore(place.state_dir / "snapshots", Stamps(place.state_dir / "stamps.json"))
    known = Stamps(place.state_dir / "stamps.json").sha256(outside)
    draft = Manifest(
        created_ms=created_ms,
        profile=Profile(model="m", engine="http", command=("/bin/e", "a b"), env={}, port=1, weights={"/w": "f" * 64}),
        host=HostFacts(
            hostname="h",
            arch="x",
            kernel="6.1",
            cpu_model="c",
            cpu_flags=(),
            xsave_size=1,
            criu_version="4.2",
            criu_sha256="0",
            page_size=4096,
        ),
        objects=(),
        files=(MappedFile(path=str(outside), bytes=6, sha256=known),),
        canary=(Exchange(path="/x", request={}, answer={}, tokens=7),),
        root_pid=1000,
        pids=(1000, 1001),
        scratch=(),
        criu_options=(),
        cold_start_s=12.34,
        bytes=0,
        bytes_written=0,
    ).model_copy(update=more)
    with store.stage() as staging:
        (staging.images / "pages-1.img").write_bytes(os.urandom(100_000))
        return store.commit(staging, draft)


def store_of(place: Place) -> SnapshotStore:
    return SnapshotStore(place.state_dir / "snapshots", Stamps(place.state_dir / "stamps.json"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def test_snapshot_ls_is_empty_where_there_is_none(place: Place) -> None:
    assert place.run("snapshot", "ls") == (0, "SNAPSHOT  MODEL  ENGINE  MADE  SIZE  COLD START  SIGNATURE  STATE\n", "")
    assert json.loads(place.run("snapshot", "ls", "--json")[1]) == []


def test_a_quarantined_snapshot_can_be_released(place: Place) -> None:
    one = snapshot(place, 1000)
    verdicts = store_of(place).verdicts
    verdicts.note(one.id, Note(what="failed", host=verdicts.host, certain=True, reason="its canary differed"))
    code, out, _ = place.run("snapshot", "release", one.id[:8])
    assert (code, out.strip()) == (0, f"released {one.id}, which was quarantined: its canary differed")
    assert verdicts.standing(one.id).quarantined is None
    assert "neither quarantined nor held back" in place.run("snapshot", "release", one.id)[1]


def test_snapshot_ls_shows_whole_quarantined_and_damaged_ones(place: Place) -> None:
    old, new, broken = (snapshot(place, created_ms) for created_ms in (1000, 2000, 3000))
    reason = Note(what="failed", host=store_of(place).verdicts.host, certain=True, reason="its canary differed")
    store_of(place).verdicts.note(old.id, reason)
    (store_of(place).folder(broken.id) / "manifest.json").chmod(0o600)
    (store_of(place).folder(broken.id) / "manifest.json").write_text("{}")
    code, out, _ = place.run("snapshot", "ls")
    lines = out.splitlines()[1:]
    assert code == 0
    assert lines[0].split()[:6] == [new.id, "m", "http", "1970-01-01", "00:00:02Z", "0.1"]
    assert lines[0].endswith("12.3 s      not checked  committed")
    assert lines[1].startswith(old.id)
    assert lines[1].endswith("quarantined: its canary differed")
    assert lines[2].split()[:3] == [broken.id, "-", "-"]
    assert "damaged: " in lines[2]
    listed = json.loads(place.run("snapshot", "ls", "--json")[1])
    assert [item["id"] for item in listed] == [new.id, old.id, broken.id]
    assert listed[0]["cold_start_s"] == 12.34


def test_snapshot_show_takes_a_prefix(place: Place) -> None:
    manifest = snapshot(place)
    code, out, _ = place.run("snapshot", "show", manifest.id[:4])
    assert code == 0
    shown = {line[:12].strip(): line[12:].strip() for line in out.splitlines()}
    assert shown["COMMAND"] == "/bin/e 'a b'"
    assert shown["CANARY"] == "1 requests, 7 tokens"
    assert shown["HOST"] == "h: c, Linux 6.1, CRIU 4.2"
    document = json.loads(place.run("snapshot", "show", manifest.id, "--json")[1])
    assert Manifest.model_validate(document["manifest"]) == manifest


def test_a_snapshot_that_is_not_there_is_one_line(place: Place) -> None:
    snapshot(place)
    for verb in ("show", "verify", "rm"):
        code, out, err = place.run("snapshot", verb, "beef" * 4)
        assert (code, out) == (1, "")
        assert err.startswith("rewake: there is no snapshot 'beefbeefbeefbeef'")
        assert err.count("\n") == 1


def test_snapshot_verify_names_every_fault_and_exits_with_1(place: Place) -> None:
    manifest = snapshot(place)
    code, out, _ = place.run("snapshot", "verify", manifest.id[:6])
    assert code == 0
    assert out.startswith(f"{manifest.id}: whole; 0.1 MiB in ")
    flip(store_of(place).folder(manifest.id) / "images" / "pages-1.img")
    (place.folder / "engine-binary").write_bytes(b"other one")
    code, out, _ = place.run("snapshot", "verify", manifest.id)
    assert code == 1
    assert [line.split(": ")[0] for line in out.splitlines()] == [
        "images/pages-1.img",
        str(place.folder / "engine-binary"),
        manifest.id,
    ]
    assert "faults: 2" in out
    code, out, _ = place.run("snapshot", "verify", manifest.id, "--json")
    assert code == 1
    assert len(json.loads(out)["faults"]) == 2


def test_snapshot_rm_takes_several_and_damaged_ones(place: Place) -> None:
    keep, one, broken = (snapshot(place, created_ms) for created_ms in (1000, 2000, 3000))
    (store_of(place).folder(broken.id) / "manifest.json").unlink()
    code, out, _ = place.run("snapshot", "rm", one.id, broken.id)
    assert (code, out) == (0, f"removed {one.id}\nremoved {broken.id}\n")
    assert list(store_of(place).list()) == [keep]


def test_snapshot_rm_removes_nothing_when_one_is_not_there(place: Place) -> None:
    manifest = snapshot(place)
    assert place.run("snapshot", "rm", manifest.id, "zz")[0] == 1
    assert list(store_of(place).list()) == [manifest]


# ---------------------------------------------------------------- the rest


async def test_doctor_exits_with_1_when_something_failed_and_prints_json(place: Place) -> None:
    place.write(port=1, restorer={"criu": "/no/such/criu"})
    code, out, _ = await place.call("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 1
    assert findings["criu"]["ok"] == "fail"
    assert set(findings["criu"]) == {"name", "ok", "found", "remedy"}
    code, out, _ = await place.call("doctor")
    assert code == 1
    line = next(line for line in out.splitlines() if " criu " in line)
    assert line.split()[:2] == ["fail", "criu"]
    assert "deploy/install/criu.sh" in line


@pytest.mark.parametrize(("words", "code"), [([], 2), (["frob"], 2), (["scale", "m", "-1"], 2), (["--help"], 0)])
def test_usage(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewake.main(words) == code
    capsys.readouterr()


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rewake.metadata, "version", lambda _: "1.2.3")
    assert rewake.main(["--version"]) == 0
    assert capsys.readouterr().out == "rewake 1.2.3\n"


def test_version_of_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def version(_: str) -> str:
        raise rewake.metadata.PackageNotFoundError

    monkeypatch.setattr(rewake.metadata, "version", version)
    assert rewake.main(["--version"]) == 1
    assert "pip install it" in capsys.readouterr().err


_HEAVY = ("aiohttp", "asyncio", "blake3", "cryptography", "httpx", "msgspec", "obstore", "opentelemetry", "prometheus_client")
_HEAVY += ("pydantic", "redis", "rich", "uvloop")
_CLIENT = {"httpx", "pydantic", "rich"}
"""What a command needs that asks the gateway and shows what it says."""


@pytest.mark.parametrize(
    ("words", "needed", "most"),
    [
        ("--version", set(), 300),
        ("ps", _CLIENT, 650),
        ("why m", _CLIENT, 650),
        ("top", _CLIENT, 650),
        ("logs nothing", _CLIENT, 650),
        ("scale m 1", _CLIENT, 650),
        ("drain m#0", _CLIENT, 650),
        ("reload", _CLIENT, 650),
        ("snapshot ls", _CLIENT | {"asyncio", "blake3", "cryptography", "msgspec"}, 800),
    ],
)
def test_a_command_imports_what_it_needs_and_no_more(place: Place, words: str, needed: set[str], most: int) -> None:
    """Counted, since a clock says more of the machine. All of them together take a second, which each command took once."""
    (place.run_dir / "admin-token").unlink()
    code = "import rewake, sys; rewake.main(sys.argv[1:]); "
    code += f"print(len(sys.modules), *(one for one in {_HEAVY} if one in sys.modules))"
    at = [] if words.startswith("-") else ["-c", str(place.config)]
    argv = [sys.executable, "-c", code, *words.split(), *at]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    count, *heavy = done.stdout.splitlines()[-1].split()
    assert set(heavy) <= needed, done.stdout + done.stderr
    assert int(count) <= most


def test_every_command_is_found_where_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is misspelt: the nearest is named, without importing any."""
    assert rewake.main(["--help"]) == 0
    assert rewake.main(["snapshot", "--help"]) == 0
    for table, before in ((rewake._COMMANDS, []), (rewake._SNAPSHOT, ["snapshot"])):
        for name in table:
            assert rewake.main([*before, name, "--help"]) == 0
    capsys.readouterr()
    assert rewake.main(["drian", "m#0"]) == 2
    assert "Did you mean 'drain'" in capsys.readouterr().err


async def test_logs_follows_until_it_is_interrupted(place: Place) -> None:
    path = engine_log(place, "i0")
    path.write_text("one\n")
    # A shell without job control starts what ends in `&` with SIGINT ignored, and all that comes of it: these tests too.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    argv = [sys.executable, "-c", f"{interruptible}; import rewake, sys; sys.exit(rewake.main(sys.argv[1:]))"]
    argv += ["logs", "i0", "--follow", "-c", str(place.config)]
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"one\n"
            with path.open("a") as file:
                file.write("two\n")
            assert await process.stdout.readline() == b"two\n"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
