"""vLLM and SGLang on a GPU, against scripted answers: what is added to the operator's command, sleep, weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.config import Engine, Model
from policies.manifest import Allocation, WeightsPart
from restorer.adapters import vllm
from restorer.adapters.engines import Sglang, adapter
from restorer.adapters.vllm import INSIDE, Vllm
from restorer.errors import EngineNotReady, SnapshotError

ADDED = ("--enable-sleep-mode", "--worker-extension-cls", "vllm_weights.RewakeWeights")


def model(
    kind: str = "vllm", command: tuple[str, ...] = ("/bin/vllm", "serve"), env: dict[str, str] | None = None, **gpu: Any
) -> Model:
    engine = {"kind": kind, "command": command, "env": env or {}, "gpu": {"count": 1, **gpu}}
    return Model.model_validate({"engine": engine})


class Server:
    """Notes what it is asked; answers by path."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.asleep: list[bool] = []
        self.answers = answers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        body = json.loads(request.content) if request.content else None
        if path != "/is_sleeping":
            self.asked.append((path, body))
        answer = self.answers.get(path.partition("?")[0].strip("/"), {})
        if path == "/is_sleeping" and "is_sleeping" not in self.answers:
            answer = {"is_sleeping": self.asleep.pop(0)}
        if callable(answer):
            answer = answer(body)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(self))


def workers(*answers: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda body: {"results": list(answers)}


def test_what_a_capture_needs_is_added_behind_the_operators_command() -> None:
    engine = adapter("m", model())
    assert engine.argv() == ("/bin/vllm", "serve", *ADDED)
    environment = engine.environment(Path("/p"), (3,))
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PYTHONPATH"] == str(INSIDE)
    assert (environment["CUDA_DEVICE_ORDER"], environment["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "3")
    assert engine.settings() == {"VLLM_SERVER_DEV_MODE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert adapter("m", model(env=own)).settings()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_nothing_is_added_that_is_there_already_and_what_the_operator_set_stays() -> None:
    command = ("/bin/vllm", "serve", "--worker-extension-cls=mine.Mine", "--enable-sleep-mode")
    engine = adapter("m", model(command=command, env={"VLLM_SERVER_DEV_MODE": "0", "PYTHONPATH": "/mine"}))
    assert engine.argv() == command
    assert engine.environment(Path("/p"))["VLLM_SERVER_DEV_MODE"] == "0"
    assert engine.environment(Path("/p"))["PYTHONPATH"] == f"{INSIDE}:/mine"


@pytest.mark.parametrize("gpu", [{"count": 0}, {"weights": "dump"}])
def test_nothing_is_added_where_no_weights_travel_apart(gpu: dict[str, Any]) -> None:
    engine = adapter("m", model(**gpu))
    assert not engine.apart
    assert engine.argv() == ("/bin/vllm", "serve")
    assert engine.settings() == {}


def test_restore_case_65_workers_map_no_memory_of_each_other() -> None:
    assert "--disable-custom-all-reduce" in adapter("m", model(count=2)).argv()
    assert "--disable-custom-all-reduce" not in adapter("m", model(count=1)).argv()
    given = adapter("m", model(count=2, command=("/bin/vllm", "serve", "--disable-custom-all-reduce")))
    assert given.argv().count("--disable-custom-all-reduce") == 1


def test_a_lease_wins_over_the_operators_choice_of_gpus() -> None:
    engine = adapter("m", model("http", env={"CUDA_VISIBLE_DEVICES": "0,1,2"}))
    assert engine.environment(Path("/p"), (5, 7))["CUDA_VISIBLE_DEVICES"] == "5,7"


@pytest.mark.parametrize("kind", ["vllm", "sglang", "http"])
def test_restore_case_65_engines_on_several_gpus_share_no_memory_between_processes(kind: str) -> None:
    settings = adapter("m", model(kind, count=2, env={"NCCL_P2P_DISABLE": "0"})).settings()
    assert settings["NCCL_CUMEM_HOST_ENABLE"] == "0"
    assert "NCCL_SHM_DISABLE" not in settings, "the host's memory is theirs to share"
    assert settings["NCCL_NVLS_ENABLE"] == "0"
    assert settings["NCCL_P2P_DISABLE"] == "0", "the operator's own"
    assert "NCCL_NVLS_ENABLE" not in adapter("m", model(kind)).settings()


def test_restore_case_65_memory_between_gpus_is_refused_before_anything_starts() -> None:
    """The driver checkpoints it and then does not restore it; who wants to see that asks for it."""
    wrong = {"NCCL_P2P_DISABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    faults = adapter("m", model(count=2, env=wrong)).obstacles()
    assert [fault.split(";")[1] for fault in faults] == [" set it to '1'", " set it to '0'"]
    assert "engine.env: NCCL_P2P_DISABLE is '0'" in faults[0]
    assert not adapter("m", model(count=2)).obstacles()
    assert not adapter("m", model(count=1, env=wrong)).obstacles()
    assert not adapter("m", model(count=2, env=wrong, untested=True)).obstacles()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_answers_that_depend_on_nothing_else_are_asked_for_in_each_engines_own_way(kind: str) -> None:
    settings = model(kind)
    engine = adapter("m", settings.model_copy(update={"engine": settings.engine.model_copy(update={"deterministic": True})}))
    vllm = kind == "vllm"
    assert (engine.settings().get("VLLM_BATCH_INVARIANT") == "1") is vllm
    assert ("--enable-deterministic-inference" in engine.argv()) is not vllm
    assert engine.settings() != adapter("m", settings).settings() or engine.argv() != adapter("m", settings).argv()


def test_no_other_engine_is_said_to_be_deterministic() -> None:
    with pytest.raises(ValueError, match="deterministic is known of vllm and sglang alone"):
        Engine(kind="http", command=("/bin/engine",), deterministic=True)


async def test_workers_on_several_gpus_part_when_they_sleep_and_join_before_anything_else() -> None:
    engine, server = adapter("m", model(count=2)), Server(collective_rpc=workers({"rank": 0}, {"rank": 1}))
    server.asleep = [True]
    assert engine.settings()["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    async with server.client() as client:
        await engine.sleep(client)
        await engine.rejoin(client)
        await adapter("m", model()).rejoin(client)
    assert [body["method"] for path, body in server.asked if path == "/collective_rpc"] == [
        "rewake_tidy",
        "rewake_part",
        "rewake_join",
    ]


def test_restore_case_68_each_engine_is_taken_for_tested_on_as_many_gpus_as_it_was_seen_on() -> None:
    most = {kind: adapter("m", model(kind)).most_gpus for kind in ("vllm", "sglang", "llama-server", "http")}
    assert most == {"vllm": 2, "sglang": 1, "llama-server": 1, "http": 1}


async def test_it_is_tidied_put_to_sleep_and_waited_for() -> None:
    server = Server(collective_rpc=workers({"rank": 0}))
    server.asleep = [False, True]
    async with server.client() as client:
        await adapter("m", model()).sleep(client)
    assert [path for path, _ in server.asked] == ["/collective_rpc", "/sleep?level=2"]
    assert server.asked[0][1]["method"] == "rewake_tidy"


async def test_it_wakes_by_the_cache_and_by_whatever_else_sleeps() -> None:
    for asleep, paths in (
        ([False], ["/wake_up?tags=kv_cache"]),
        ([True, False], ["/wake_up?tags=kv_cache", "/wake_up"]),
    ):
        server = Server()
        server.asleep = list(asleep)
        async with server.client() as client:
            await adapter("m", model()).wake(client)
        assert [path for path, _ in server.asked] == paths


async def test_one_that_does_not_fall_asleep_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_SLEEP_S", 0.1)
    server = Server(collective_rpc=workers({"rank": 0}), is_sleeping={"is_sleeping": False})
    async with server.client() as client:
        with pytest.raises(EngineNotReady, match=r"m did not fall asleep within 0\.1 s"):
            await adapter("m", model()).sleep(client)


async def test_weights_are_described_by_every_worker() -> None:
    answers = [{"protocol": 1, "rank": rank, "allocations": [[8, f"{rank}a"], [4, "0b"]]} for rank in (0, 1)]
    server = Server(collective_rpc=workers(*answers), is_sleeping={"is_sleeping": False})
    async with server.client() as client:
        found = await adapter("m", model()).describe_weights(client)
    assert found[1] == (Allocation(bytes=8, fingerprint="1a"), Allocation(bytes=4, fingerprint="0b"))


@pytest.mark.parametrize(
    ("answers", "error", "why"),
    [
        ({"is_sleeping": httpx.Response(404)}, SnapshotError, "no route /is_sleeping"),
        ({"collective_rpc": workers({"protocol": 2, "allocations": []})}, SnapshotError, "another version of vllm_weights"),
        ({"collective_rpc": workers({"protocol": 1, "allocations": []})}, SnapshotError, "no allocation that vLLM's allocator"),
        ({"collective_rpc": workers({"protocol": 1, "allocations": [["x", 1]]})}, EngineNotReady, "described their weights as"),
        ({"collective_rpc": workers({"error": "CUDA error: bad"})}, EngineNotReady, "rewake_describe: CUDA error: bad"),
        ({"collective_rpc": {"results": []}}, EngineNotReady, "rewake_describe of the workers answered"),
        ({"collective_rpc": httpx.Response(500, text="no such method")}, EngineNotReady, "answered 500: no such method"),
        ({"collective_rpc": httpx.Response(200, text="?")}, EngineNotReady, "of the workers answered \\?"),
    ],
)
async def test_capabilities_are_probed_and_their_lack_is_named(answers: dict[str, Any], error: type[Exception], why: str) -> None:
    server = Server(**{"is_sleeping": {"is_sleeping": False}, **answers})
    async with server.client() as client:
        with pytest.raises(error, match=why):
            await adapter("m", model()).describe_weights(client)


async def test_weights_are_exported_and_imported_rank_by_rank() -> None:
    parts = {"parts": [{"name": "part-00000", "bytes": 3, "sha256": "ab"}]}
    server = Server(collective_rpc=workers(parts, parts))
    async with server.client() as client:
        found = await adapter("m", model()).export_weights(client, [Path("/a"), Path("/b")], 7, within_s=9)
    assert found == [(WeightsPart(name="part-00000", bytes=3, sha256="ab"),)] * 2
    ranks = json.loads(server.asked[0][1]["args"][0])["ranks"]
    assert ranks == [{"folder": "/a", "part_bytes": 7}, {"folder": "/b", "part_bytes": 7}]
    server = Server(collective_rpc=workers({"fingerprints": ["0a"]}, {"fingerprints": ["0b"]}))
    async with server.client() as client:
        assert await adapter("m", model()).import_weights(client, [{"socket": "/s"}, {"files": []}], within_s=9) == [
            ("0a",),
            ("0b",),
        ]
    assert [path for path, _ in server.asked] == ["/wake_up?tags=weights", "/collective_rpc"]


async def test_no_salt_goes_where_no_prompt_goes() -> None:
    server = Server(collective_rpc=workers({"rank": 0}), is_sleeping={"is_sleeping": True})
    async with server.client() as client:
        await adapter("m", model()).sleep(client)
    assert all("cache_salt" not in (body or {}) for _, body in server.asked)


async def test_engines_that_cannot_part_with_weights_say_so() -> None:
    engine = adapter("m", model("llama-server"))
    assert not engine.apart
    async with Server().client() as client:
        for call in (
            engine.describe_weights(client),
            engine.export_weights(client, [], 1, within_s=9),
            engine.import_weights(client, [], within_s=9),
        ):
            with pytest.raises(SnapshotError, match="llama-server cannot"):
                await call
        await engine.sleep(client)
        await engine.wake(client)


async def test_sglang_gives_up_its_cache_and_asks_nothing_of_it_twice() -> None:
    server = Server()
    engine = adapter("m", model("sglang"))
    assert isinstance(engine, Sglang)
    async with server.client() as client:
        await engine.sleep(client)
        await engine.wake(client)
        await engine.ask(client, "/v1/completions", {"prompt": "x"})
    assert server.asked == [
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("/flush_cache", None),
        ("/v1/completions", {"prompt": "x"}),
    ]


async def test_an_sglang_without_the_routes_is_dumped_whole_and_one_on_the_cpu_not_asked() -> None:
    server = Server(release_memory_occupation=httpx.Response(404))
    async with server.client() as client:
        await adapter("m", model("sglang")).sleep(client)
        server.asked.clear()
        await adapter("m", model("sglang", count=0)).sleep(client)
    assert server.asked == []
    async with Server(release_memory_occupation=httpx.Response(500, text="busy")).client() as client:
        with pytest.raises(EngineNotReady, match="answered 500: busy"):
            await adapter("m", model("sglang")).sleep(client)


def test_the_class_that_is_named_is_the_one_there_is() -> None:
    assert Vllm.EXTENSION == "vllm_weights.RewakeWeights"
