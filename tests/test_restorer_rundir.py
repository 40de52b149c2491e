"""The run folder: its permissions, the admin token, the lock."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
from conftest import require_root
from processes import mode, owned, tcp_listeners, uid_of

from restorer.errors import Environment
from restorer.installation import embedded, rundir
from restorer.installation.rundir import Account, Address
from restorer.installation.supervisor import Supervisor

NOBODY = Account("nobody", pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("nobody").pw_gid)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another account may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_the_token_is_made_for_us_alone_and_kept(tmp_path: Path) -> None:
    token = rundir.admin_token(tmp_path)
    first = token.read_text()
    assert mode(token) == 0o600
    assert token.stat().st_uid == os.geteuid()
    assert len(first.strip()) >= 43
    assert rundir.admin_token(tmp_path).read_text() == first
    assert [path.name for path in tmp_path.iterdir()] == ["admin-token"]


@pytest.mark.parametrize("spoil", ["open", "foreign", "short", "link"])
def test_a_token_that_others_could_know_is_replaced(tmp_path: Path, spoil: str) -> None:
    token = rundir.admin_token(tmp_path)
    first = token.read_text()
    if spoil == "open":
        token.chmod(0o644)
    elif spoil == "foreign":
        require_root()
        os.chown(token, NOBODY.uid, NOBODY.gid)
    elif spoil == "short":
        token.write_text("x\n")
    else:
        token.rename(tmp_path / "elsewhere")
        token.symlink_to(tmp_path / "elsewhere")
    again = rundir.admin_token(tmp_path)
    assert again.read_text() != first
    assert stat.S_ISREG(again.lstat().st_mode)
    assert (mode(again), again.stat().st_uid) == (0o600, os.geteuid())


def test_a_folder_gets_its_mode_however_it_was(tmp_path: Path) -> None:
    made = tmp_path / "a" / "b"
    assert mode(rundir.folder(made, 0o700, setting="state_dir")) == 0o700
    made.chmod(0o777)
    assert mode(rundir.folder(made, 0o700, setting="state_dir")) == 0o700


@pytest.mark.parametrize(("make", "said"), [("file", "File exists; set state_dir"), ("link", "is not a folder but a link")])
def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, make: str, said: str) -> None:
    path = tmp_path / "place"
    if make == "file":
        path.write_text("")
    else:
        path.symlink_to(tmp_path)
    with pytest.raises(Environment, match=said):
        rundir.folder(path, 0o700, setting="state_dir")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    require_root()
    path = tmp_path / "place"
    path.mkdir()
    os.chown(path, NOBODY.uid, NOBODY.gid)
    with pytest.raises(Environment, match=rf"belongs to uid {NOBODY.uid}.*set run_dir"):
        rundir.folder(path, 0o755, setting="run_dir")


def test_a_closed_parent_is_named(place: Path) -> None:
    closed = place / "closed"
    (closed / "run").mkdir(parents=True)
    assert rundir.closed_to(closed / "run", NOBODY) is None
    closed.chmod(0o700)
    assert rundir.closed_to(closed / "run", NOBODY) == closed
    assert rundir.closed_to(closed / "run", Account("me", os.geteuid(), os.getegid())) is None


def test_an_account_that_cannot_be_used_is_refused() -> None:
    require_root()
    with pytest.raises(Environment, match=r"gateway\.user: there is no account 'nosuch'"):
        rundir.account("nosuch")
    with pytest.raises(Environment, match=r"gateway\.user: 'root' is root"):
        rundir.account("root")
    assert rundir.account("nobody") == NOBODY


def test_the_lock_has_one_holder_and_the_second_learns_who(tmp_path: Path) -> None:
    with rundir.lock(tmp_path):
        assert mode(tmp_path / "up.lock") == 0o600
        with pytest.raises(Environment, match=rf"already runs on {tmp_path} \(pid {os.getpid()}\)"), rundir.lock(tmp_path):
            pass
    with rundir.lock(tmp_path) as lock:
        assert lock.left == {}


def test_the_next_holder_finds_what_still_runs_and_nothing_else(tmp_path: Path) -> None:
    runs, ends = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        with rundir.lock(tmp_path) as lock:
            lock.remember({"restorer": runs.pid, "store": ends.pid})
        ends.kill()
        ends.wait()
        with rundir.lock(tmp_path) as lock:
            assert lock.left == {"restorer": runs.pid}
        # Still remembered, should that one be killed as well.
        with rundir.lock(tmp_path) as lock:
            assert lock.left == {"restorer": runs.pid}
    finally:
        runs.kill()
        runs.wait()


def test_a_reused_pid_and_a_torn_file_are_nobody(tmp_path: Path) -> None:
    (tmp_path / "up.lock").write_text(f'{{"pid": 1, "children": {{"restorer": [{os.getpid()}, 1]}}}}')
    with rundir.lock(tmp_path) as lock:
        assert lock.left == {}
    (tmp_path / "up.lock").write_text('{"pid": 1, "chil')
    with rundir.lock(tmp_path) as lock:
        assert lock.left == {}


async def test_the_embedded_store_runs_as_its_account_behind_a_private_socket(place: Path) -> None:
    who = NOBODY if os.geteuid() == 0 else None
    uid = who.uid if who else os.geteuid()
    child, url = embedded.child(place, who)
    said: list[str] = []
    supervisor = Supervisor(say=lambda name, text: said.append(f"{name} {text}"))
    supervisor.start(child)
    try:
        await embedded.answers(url, within=10)
        socket = place / "store" / "store.sock"
        assert url == f"unix://{socket}"
        assert owned(socket) == (0o600, uid)
        assert owned(socket.parent) == (0o700, uid)
        assert uid_of(supervisor.pids["store"]) == uid
        assert tcp_listeners(supervisor.pids["store"]) == set()
        assert {path.name for path in socket.parent.iterdir()} == {"store.sock"}
        assert said == []
    finally:
        await supervisor.stop("store")


async def test_the_embedded_store_refuses_rather_than_forgets_and_comes_back_after_a_crash(place: Path) -> None:
    child, url = embedded.child(place, None)
    supervisor = Supervisor(say=lambda *_: None, first_delay_s=0.01)
    supervisor.start(child)
    try:
        await embedded.answers(url, within=10)
        client = redis.asyncio.from_url(url, decode_responses=True)
        assert await client.config_get("maxmemory-policy", "save", "appendonly") == {
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "no",
        }
        await client.aclose()
        os.kill(supervisor.pids["store"], 9)
        await embedded.answers(url, within=10)
    finally:
        await supervisor.stop("store")


async def test_the_embedded_store_starts_although_its_account_cannot_reach_the_binary(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_root()
    private = place / "private"
    private.mkdir(mode=0o700)
    copy = private / "valkey-server"
    copy.write_bytes(embedded.binary().read_bytes())
    copy.chmod(0o755)
    monkeypatch.setattr(embedded, "binary", lambda: copy)
    child, url = embedded.child(place, NOBODY)
    supervisor = Supervisor(say=lambda *_: None)
    supervisor.start(child)
    try:
        await embedded.answers(url, within=10)
        assert uid_of(supervisor.pids["store"]) == NOBODY.uid
    finally:
        await supervisor.stop("store")


async def test_a_store_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(Environment, match=r"the store at redis://127\.0\.0\.1:1/0 does not answer within 0\.2 s: ") as caught:
        await embedded.answers("redis://:secret@127.0.0.1:1/0", within=0.2)
    assert "secret" not in str(caught.value)
    with pytest.raises(Environment, match=r"store\.url: .*give redis://"):
        await embedded.answers("http://127.0.0.1:1", within=0.2)


def test_a_run_folder_too_deep_for_a_socket_is_refused(place: Path) -> None:
    with pytest.raises(Environment, match="too long for a socket's path; set run_dir"):
        embedded.child(place / ("x" * 90), None)


def test_the_address_of_what_runs_is_found_also_when_its_run_folder_was_changed(tmp_path: Path) -> None:
    run_dir, state_dir, elsewhere = (tmp_path / name for name in ("run", "state", "elsewhere"))
    for folder in (run_dir, state_dir, elsewhere):
        folder.mkdir()
    at = Address(url="https://127.0.0.1:8443", certificate="/c.pem", run_dir=str(run_dir))
    with rundir.lock(run_dir):
        rundir.announce(at, state_dir)
        assert rundir.address(run_dir, state_dir) == at
        assert rundir.address(elsewhere, state_dir) == at
        assert rundir.address(elsewhere, elsewhere) is None
        (run_dir / "up.json").write_text("{")
        assert rundir.address(run_dir, state_dir) == at
    # Its files are left when it was killed; its lock is not.
    assert rundir.address(run_dir, state_dir) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_an_address_that_somebody_else_wrote_is_not_believed(tmp_path: Path) -> None:
    with rundir.lock(tmp_path):
        rundir.announce(Address(url="http://127.0.0.1:1", run_dir=str(tmp_path)), tmp_path)
        os.chown(tmp_path / "up.json", 12345, 12345)
        assert rundir.address(tmp_path, tmp_path) is None
