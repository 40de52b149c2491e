"""The whole system as a user runs it: `rewake up`, the real CRIU, a real engine, and what can go wrong with each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import yaml
from conftest import require_root

pytestmark = pytest.mark.criu

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PROMPT = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "seed": 1}
CRIU_TIMEOUT_S = 6
WRAPPER = """#!/bin/sh
# Notes what CRIU is asked to do, and holds restores as long as a test wants.
echo "$1" >> {folder}/criu.calls
while [ "$1" = restore ] && [ -e {folder}/hold ]; do sleep 0.02; done
exec {criu} "$@"
"""


def needed(name: str) -> str:
    """A real part, named by the environment (`make test` does); skipped without it locally, failed in CI."""
    value = os.environ.get(name, "")
    if not value or not Path(value).exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {name}; `make test` installs it and sets this")
    return value


def eventually(check: Callable[[], T], what: str, within: float = 20.0) -> T:
    deadline = time.monotonic() + within
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.02)
    return result


class Installation:
    """One `rewake up` with folders, a port and a network of its own."""

    def __init__(self, folder: Path, network: str, models: dict[str, Any], **restorer: Any) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        wrapper = folder / "criu"
        wrapper.write_text(WRAPPER.format(folder=folder, criu=needed("REWAKE_CRIU")))
        wrapper.chmod(0o755)
        self.calls_file, self.hold_file = folder / "criu.calls", folder / "hold"
        self.run_dir, self.network = folder / "run", network
        self.settings = {
            "state_dir": str(folder / "state"),
            "run_dir": str(self.run_dir),
            "gateway": {"port": self.port, "workers": 2},
            "restorer": {"criu": str(wrapper), "network": network, "criu_timeout_s": CRIU_TIMEOUT_S, "lease_s": 4, **restorer},
            "models": models,
        }
        self.config = folder / "rewake.yaml"
        self.config.write_text(yaml.safe_dump(self.settings))
        self.base = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base, timeout=60)
        self.up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.folder / "up.log").open("ab")
        argv = [sys.executable, str(ROOT / "rewake.py"), "up", "-c", str(self.config)]
        self.up = subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        log.close()
        eventually(self.ready, f"ready; see {self.folder / 'up.log'}", 30)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/ready").status_code == 200 and bool(self.admin("snapshots")["hosts"])
        return False

    def stop(self) -> int:
        assert self.up is not None
        self.http.close()
        self.up.send_signal(signal.SIGINT)
        return self.up.wait(60)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(ROOT / "rewake.py"), *arguments, "-c", str(self.config)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)

    def admin(self, path: str) -> Any:
        token = (self.run_dir / "admin-token").read_text().strip()
        answer = self.http.get(f"/admin/v1/{path}", headers={"Authorization": f"Bearer {token}"})
        answer.raise_for_status()
        return answer.json()

    def replicas(self, model: str, state: str = "admitted") -> list[dict[str, Any]]:
        return [one for one in self.admin("replicas")["replicas"] if one["model"] == model and one["state"] == state]

    def complete(self, model: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**PROMPT, "model": model}, **more)

    def snapshot(self, model: str) -> Path:
        """Make one; its folder."""
        made = self.cli("snapshot", "create", model)
        assert made.returncode == 0, made.stdout + made.stderr
        return max((self.folder / "state/snapshots").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime).parent

    def park(self, model: str) -> None:
        done = self.cli("scale", model, "0")
        assert done.returncode == 0, done.stderr

    def calls(self, verb: str) -> int:
        return self.calls_file.read_text().split().count(verb) if self.calls_file.exists() else 0

    def restorer_pid(self) -> int:
        needle = f"restorer\0--config\0{self.config}".encode()
        return next(pid for pid, argv in processes() if needle in argv)

    def boxes(self) -> list[int]:
        mark = f"rewake-box={self.run_dir}".encode()
        return [pid for pid, argv in processes() if mark in argv and argv.split(b"\0", 1)[0].endswith(b"unshare")]

    def nothing_half_made(self) -> bool:
        """Boxes belong to admitted replicas or are spare; no staging, no stray CRIU."""
        admitted = [one for one in self.admin("replicas")["replicas"] if one["state"] in ("admitted", "draining")]
        spare = self.settings["restorer"].get("parallel_starts", 3)
        criu = [pid for pid, argv in processes() if str(self.folder / "criu").encode() in argv and b"rewake.py" not in argv]
        staging = list((self.folder / "state/snapshots").glob(".staging-*"))
        return len(self.boxes()) <= len(admitted) + spare and not criu and not staging

    def nothing_left(self) -> bool:
        links = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        prefix = self.network.rsplit(".", 2)[0]
        ours = [line for line in links.splitlines() if f"inet {prefix}." in line]
        return not self.boxes() and not ours and not any(str(self.folder).encode() in argv for _, argv in processes())


def processes() -> list[tuple[int, bytes]]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                found.append((int(entry), Path(f"/proc/{entry}/cmdline").read_bytes()))
    return found


def model(**policy: Any) -> dict[str, Any]:
    gguf = needed("REWAKE_MODEL")
    options = ["--host", "0.0.0.0", "--port", "8000", "--threads", "1", "--ctx-size", "512", "--parallel", "1", "--no-webui"]
    return {
        "engine": {"kind": "llama-server", "command": [needed("REWAKE_LLAMA_SERVER"), "--model", gguf, *options]},
        "weights": [gguf],
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["The capital of France is", "One, two, three,"]},
        **policy,
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    require_root()
    # Not pytest's folder: socket paths are short, and the gateway's account must be able to pass.
    folder = Path(tempfile.mkdtemp(prefix="rewake-e2e-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    extra = place / "adapter.bin"
    extra.write_bytes(b"version 1")
    weights = [needed("REWAKE_MODEL"), str(extra)]
    models = {
        "base": model(),
        "trio": model(max_replicas=3, concurrency=1),
        "eager": model(on_cold="reject"),
        "flipped": model(),
        "short": model(),
        "strict": model(on_restore_failure="reject"),
        "picky": model(on_no_snapshot="reject", weights=weights),
    }
    system = Installation(place, "198.18.200.0/24", models)
    system.start()
    for name in ("base", "trio", "eager"):
        system.snapshot(name)
    yield system
    if system.up is not None and system.up.poll() is None:
        system.stop()


def test_gateway_case_21_fifty_first_requests_share_one_restore(system: Installation) -> None:
    system.park("base")
    before = system.calls("restore")
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(
            pool.map(
                lambda _: httpx.post(f"{system.base}/v1/completions", json={**PROMPT, "model": "base"}, timeout=60), range(50)
            )
        )
    assert [answer.status_code for answer in answers] == [200] * 50
    assert {answer.headers["x-rewake-start"] for answer in answers} == {"restored"}
    assert len({answer.headers["x-rewake-incarnation"] for answer in answers}) == 1
    assert system.calls("restore") == before + 1


def test_restore_case_11_ten_restores_in_a_row_repeat_the_donor_bit_for_bit(system: Installation) -> None:
    """Also cases 15, 19 and 20: each engine's log grows and its /dev/shm is its own, and the next restore works."""
    texts, incarnations = set(), set()
    for _ in range(10):
        system.park("base")
        answer = system.complete("base")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-rewake-start"] == "restored"
        texts.add(answer.json()["choices"][0]["text"])
        incarnations.add(answer.headers["x-rewake-incarnation"])
    assert len(texts) == 1
    assert len(incarnations) == 10


def test_restore_case_09_three_clones_at_once_answer_for_themselves(system: Installation) -> None:
    scaled = system.cli("scale", "trio", "3")
    assert scaled.returncode == 0, scaled.stderr
    clones = system.replicas("trio")
    assert {one["start"] for one in clones} == {"restored"}
    assert len({one["incarnation"] for one in clones}) == len({one["address"] for one in clones}) == 3
    answers = [
        httpx.post(f"http://{one['address']}:{one['port']}/v1/completions", json=PROMPT, timeout=60).json() for one in clones
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    system.park("trio")
    assert system.replicas("trio") == []


def test_on_cold_reject_and_the_unmodified_client_comes_back_in_time(system: Installation) -> None:
    refused = system.complete("eager")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_loading"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.headers["x-should-retry"] == "true"
    eventually(lambda: system.replicas("eager"), "the start that the refusal asked for")
    system.park("eager")
    client = openai.OpenAI(base_url=f"{system.base}/v1", api_key="none")
    message: Any = {"role": "user", "content": "Hello"}
    answer = client.chat.completions.with_raw_response.create(model="eager", messages=[message], max_tokens=4)
    assert answer.headers["x-rewake-start"] == "restored"
    client.close()


def test_gateway_case_22_the_sole_client_leaves_and_no_restore_starts(system: Installation) -> None:
    system.park("base")
    system.park("trio")
    before = system.calls("restore")
    system.hold_file.touch()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Every place for a start is taken by restores that are held ...
            busy = pool.submit(system.cli, "scale", "trio", "3")
            eventually(lambda: system.calls("restore") == before + 3, "three restores under way")
            # ... so this client's start is still to be claimed when it leaves.
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{system.base}/v1/completions", json={**PROMPT, "model": "base"}, timeout=1)
            system.hold_file.unlink()
            assert busy.result().returncode == 0
    finally:
        system.hold_file.unlink(missing_ok=True)
    eventually(lambda: system.replicas("base", "cancelled"), "the start to be cancelled")
    assert system.calls("restore") == before + 3
    system.park("trio")


def test_gateway_case_18_kill_9_of_the_restorer_in_mid_restore_and_the_waiter_is_served(system: Installation) -> None:
    system.park("base")
    before = system.calls("restore")
    system.hold_file.touch()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(system.complete, "base")
            eventually(lambda: system.calls("restore") > before, "the restore to begin")
            os.kill(system.restorer_pid(), signal.SIGKILL)
            system.hold_file.unlink()
            answer = waiter.result(timeout=60)
    finally:
        system.hold_file.unlink(missing_ok=True)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "restored"
    eventually(system.nothing_half_made, "what the dead restorer left to be gone")


def test_kill_9_of_the_restorer_while_serving_keeps_the_replica(system: Installation) -> None:
    before = system.complete("base")
    old = system.restorer_pid()
    os.kill(old, signal.SIGKILL)
    during = system.complete("base")
    eventually(lambda: any(b"restorer" in argv and pid != old for pid, argv in processes()) and system.ready(), "a new restorer")
    after = system.complete("base")
    assert [one.status_code for one in (before, during, after)] == [200, 200, 200]
    assert len({one.headers["x-rewake-incarnation"] for one in (before, during, after)}) == 1
    eventually(system.nothing_half_made, "spare boxes of the dead restorer to be gone")


def test_kill_9_of_the_engine_while_serving_and_the_next_request_is_restored(system: Installation) -> None:
    first = system.complete("base")
    incarnation = first.headers["x-rewake-incarnation"]
    assert first.status_code == 200
    engine = [pid for pid, argv in processes() if b"llama-server" in argv and f"/boxes/{incarnation}".encode() in _mounts(pid)]
    for pid in engine:
        os.kill(pid, signal.SIGKILL)
    assert engine
    eventually(lambda: not system.replicas("base"), "the death to be noticed")
    second = system.complete("base")
    assert (second.status_code, second.headers["x-rewake-start"]) == (200, "restored")
    assert second.headers["x-rewake-incarnation"] != incarnation


def _mounts(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/mountinfo").read_bytes()
    return b""


def test_restore_case_27_a_flipped_byte_is_refused_before_criu_and_the_client_gets_a_labelled_cold_start(
    system: Installation,
) -> None:
    """Also case 77: the fallback says that it is one."""
    page_images = (system.snapshot("flipped") / "images").glob("pages-*.img")
    damaged = max(page_images, key=lambda path: path.stat().st_blocks)
    with damaged.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    before = system.calls("restore")
    answer = system.complete("flipped")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    assert system.calls("restore") == before
    (replica,) = system.replicas("flipped")
    assert damaged.name in replica["reason"]
    assert system.cli("snapshot", "ls").stdout.count("quarantined") == 1
    system.park("flipped")


def test_restore_case_25_a_truncated_image_is_refused_before_criu(system: Installation) -> None:
    damaged = max((system.snapshot("short") / "images").glob("pages-*.img"), key=lambda path: path.stat().st_size)
    os.truncate(damaged, damaged.stat().st_size - 4096)
    before = system.calls("restore")
    answer = system.complete("short")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    assert system.calls("restore") == before
    system.park("short")


def test_gateway_case_45_a_canary_that_differs_is_never_admitted(system: Installation) -> None:
    """The bytes are whole and the manifest is canonical, but its canary asks for an answer the engine does not give."""
    folder = system.snapshot("strict")
    _with_another_answer(folder)
    answer = system.complete("strict")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "restore_failed"
    assert answer.headers["x-should-retry"] == "false"
    assert "Retry-After" not in answer.headers
    assert system.replicas("strict") == []
    assert len(system.replicas("strict", "quarantined")) == 1
    eventually(system.nothing_half_made, "the replica that differed to be gone")


def _with_another_answer(folder: Path) -> None:
    """Rewrite a manifest under a new id, as only who holds root could."""
    sys.path.insert(0, str(ROOT))
    from policies.manifest import Manifest, canonical  # noqa: PLC0415

    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    exchange = manifest.canary[0]
    wrong = exchange.model_copy(update={"answer": {**exchange.answer, "content": "something else"}})
    changed = manifest.model_copy(update={"canary": (wrong, *manifest.canary[1:])})
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(canonical(changed))
    (folder / "manifest.json").chmod(0o400)
    folder.rename(folder.with_name(changed.id))


def test_gateway_case_03_a_host_mismatch_is_refused_at_once_with_every_reason_and_exit_code_3(system: Installation) -> None:
    system.snapshot("picky")
    (system.folder / "adapter.bin").write_bytes(b"version 2")
    before = system.calls("restore")
    scaled = system.cli("scale", "picky", "1")
    assert scaled.returncode == 3
    assert "adapter.bin" in scaled.stderr + scaled.stdout
    answer = system.complete("picky")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restore_failed")
    assert "adapter.bin" in answer.json()["error"]["message"]
    assert system.calls("restore") == before


def test_a_criu_that_hangs_is_ended_with_its_namespaces_and_the_waiter_gets_a_labelled_cold_start(system: Installation) -> None:
    system.park("base")
    system.hold_file.touch()
    try:
        answer = system.complete("base")
    finally:
        system.hold_file.unlink()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("base")
    assert "did not end within" in replica["reason"]
    eventually(system.nothing_half_made, "the hung CRIU to be gone")


def test_stopping_it_leaves_nothing_behind(system: Installation) -> None:
    assert system.complete("base").status_code == 200
    assert system.stop() == 0
    eventually(system.nothing_left, "processes and links to be gone")


def test_a_full_disk_during_the_dump_leaves_the_donor_serving(place: Path) -> None:
    folder = place / "full"
    (folder / "state").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder / "state")], check=True)
    small = Installation(folder, "198.18.201.0/24", {"base": model(snapshot={"create": "auto"})})
    try:
        small.start()
        answer = small.complete("base")
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
        (replica,) = small.replicas("base")
        assert "no snapshot was made" in replica["reason"]
        assert "disk full" in replica["reason"]
        assert small.complete("base").json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        assert json.loads(small.cli("snapshot", "ls", "--json").stdout) == []
        eventually(small.nothing_half_made, "the half-made snapshot to be gone")
        assert small.stop() == 0
        eventually(small.nothing_left, "processes and links to be gone")
    finally:
        if small.up is not None and small.up.poll() is None:
            small.stop()
        subprocess.run(["umount", str(folder / "state")], check=True)
