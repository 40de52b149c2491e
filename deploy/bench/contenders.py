"""The servers that ``bench-gateway`` compares, each with one worker, in front of the same upstream."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rig import BUILD, BenchError, free_port, gateway, until

PEERS = BUILD / "peers"
HERE = Path(__file__).parent
NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 20000; }}
http {{
    access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder}; client_max_body_size 64m; keepalive_requests 1000000;
    upstream replica {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://replica; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
                      proxy_read_timeout 600s; }}
    }}
}}
"""


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    name: str
    port: int
    pid: int

    def tree(self) -> list[int]:
        """It and all its descendants."""
        found, todo = [], [self.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return found

    def cpu_s(self) -> float:
        """CPU seconds that it and its descendants have used."""
        return sum(_cpu_s(pid) for pid in self.tree())

    def memory(self) -> int:
        """Resident bytes of it and its descendants."""
        return sum(_resident(pid) for pid in self.tree())


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        # In nanoseconds where the scheduler tells; clock ticks are too coarse for a short round.
        total = 0
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
        return total / 1e9
    return 0.0


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextlib.contextmanager
def _process(name: str, port: int, argv: Sequence[str], within: float = 60.0, **environment: str) -> Iterator[Running]:
    log = (BUILD / f"bench-{name}.log").open("wb")
    process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True)
    try:
        until(lambda: _answers(process, port, log.name), f"{name}; see {log.name}", within)
        yield Running(name, port, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def _answers(process: subprocess.Popen[bytes], port: int, log: str) -> bool:
    if process.poll() is not None:
        raise BenchError(f"it ended with status {process.returncode}; see {log}")
    body = {"model": "bench", "messages": [{"role": "user", "content": "hello"}]}
    try:
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json=body,
            headers={"Authorization": "Bearer rk-bench"},
            timeout=5,
            trust_env=False,
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


@contextlib.contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, upstream=upstream))
    with _process("nginx", port, [str(PEERS / "bin/nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]) as running:
        yield running


@contextlib.contextmanager
def naive(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    with _process("naive", port, [sys.executable, str(HERE / "naive.py"), str(port), str(upstream)]) as running:
        yield running


@contextlib.contextmanager
def vllm_router(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    options = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        f"http://127.0.0.1:{upstream}",
        "--policy",
        "round_robin",
    ]
    with _process("vllm_router", port, [str(PEERS / "venv/bin/vllm-router"), *options, "--log-level", "error"]) as running:
        yield running


@contextlib.contextmanager
def sglang_router(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    program = [str(PEERS / "venv/bin/python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    options = ["--worker-urls", f"http://127.0.0.1:{upstream}", "--policy", "round_robin", "--prometheus-port", str(free_port())]
    with _process("sglang_router", port, [*program, *options, "--log-level", "error"]) as running:
        yield running


@contextlib.contextmanager
def litellm(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    target = f"{{model: openai/bench, api_base: 'http://127.0.0.1:{upstream}/v1', api_key: none}}"
    (folder / "litellm.yaml").write_text(f"model_list: [{{model_name: bench, litellm_params: {target}}}]\n")
    argv = [str(PEERS / "venv/bin/litellm"), "--host", "127.0.0.1", "--port", str(port), "--config", str(folder / "litellm.yaml")]
    offline = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with _process("litellm", port, argv, 120.0, **offline) as running:
        yield running


SOURCE = (sys.executable, "-m", "gateway")


@contextlib.contextmanager
def _rewake(name: str, upstream: int, *, program: Sequence[str] = SOURCE, **more: Any) -> Iterator[Running]:
    """With what a gateway of many tenants has in the path: keys, limits, accounting."""
    key = "sha256:" + hashlib.sha256(b"rk-bench").hexdigest()
    many = 10**9
    tenants = {
        "bench": {"keys": [key], "limits": {"requests_per_minute": many, "tokens_per_minute": many, "concurrency": 100_000}}
    }
    engine = {"engine": {"kind": "http", "command": ["/bin/true"]}, "concurrency": 100_000}
    top = {"tenants": tenants, **more.pop("top", {})}
    with gateway({"bench": engine}, top=top, program=program, log=f"bench-{name}", **more) as made:
        made.admit("bench", upstream, concurrency=100_000)
        until(lambda: _answers(made.process, made.port, f"build/bench-{name}.log"), name)
        yield Running(name, made.port, made.process.pid)


def _compiled(*environment: str) -> Sequence[str]:
    python = BUILD / "compiled/bin/python"
    if not python.exists():
        raise BenchError(f"{python} is missing; `make compiled` builds it")
    # Not from the sources in the current folder.
    return ("env", *environment, str(python), "-P", "-m", "gateway")


@contextlib.contextmanager
def rewake(folder: Path, upstream: int) -> Iterator[Running]:
    """As `make compiled` installs it, with metrics and access log, no tracing."""
    with _rewake("rewake", upstream, program=_compiled()) as running:
        yield running


@contextlib.contextmanager
def rewake_interpreted(folder: Path, upstream: int) -> Iterator[Running]:
    """The same, as it lies in the source tree."""
    with _rewake("rewake_interpreted", upstream) as running:
        yield running


@contextlib.contextmanager
def rewake_observed(folder: Path, upstream: int) -> Iterator[Running]:
    """Compiled: metrics, access log, and as many traces as are made by default, for a collector that takes them all."""
    port = free_port()
    sink = subprocess.Popen([sys.executable, str(HERE / "sink.py"), str(port)])
    try:
        tracing = {"endpoint": f"http://127.0.0.1:{port}/v1/traces"}
        with _rewake("rewake_observed", upstream, program=_compiled(), top={"tracing": tracing}) as running:
            yield running
    finally:
        sink.kill()
        sink.wait()


@contextlib.contextmanager
def rewake_unobserved(folder: Path, upstream: int) -> Iterator[Running]:
    """Compiled: neither metrics nor access log nor traces."""
    lib = BUILD / "unobserved/lib"
    if not lib.exists():
        raise BenchError(f"{lib} is missing; `make build/unobserved/.built` builds it")
    with _rewake("rewake_unobserved", upstream, program=_compiled(f"PYTHONPATH={lib}"), access_log=False) as running:
        yield running


Contender = Callable[[Path, int], contextlib.AbstractContextManager[Running]]
CONTENDERS: dict[str, Contender] = {
    "nginx": nginx,
    "rewake": rewake,
    "rewake_interpreted": rewake_interpreted,
    "rewake_observed": rewake_observed,
    "rewake_unobserved": rewake_unobserved,
    "naive": naive,
    "vllm_router": vllm_router,
    "sglang_router": sglang_router,
    "litellm": litellm,
}
