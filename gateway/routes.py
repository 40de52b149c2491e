"""Every path there is, as one literal table: what serves it, who may ask, where its model is named.

What is not in the table is no path: an engine's control routes (sleep, weights, caches, adapters) are reached by nobody.
Pure: finds a route by the method and the target as they stand on the wire, and knows nothing of connections or models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from gateway.errors import MethodNotAllowed, NotFound

Auth = Literal["tenant", "admin", "none"]
Dialect = Literal["openai", "responses", "anthropic"]
ModelSource = Literal["body", "either", "hint"]
_SHOWN = 200
_NEAR = 0.8
"""How alike a path must be to one of ours to be taken for a slip of the hand, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    name: str
    """The path as a template; also the value of metrics' ``route`` label."""
    method: str
    serves: str
    """``replica``, ``socket`` (a WebSocket of a replica), or the name of one of the gateway's own answers."""
    summary: str
    auth: Auth = "tenant"
    dialect: Dialect = "openai"
    """How errors are shaped."""
    model: ModelSource = "body"
    """Where the model is named: in the body, there or else by ``x-rewake-model`` or ``?model=``, or by these alone."""
    multipart: bool = False
    """A form is accepted as well as JSON."""
    events: bool = False
    """With ``stream: true`` the answer is an event stream."""
    wakes: bool = True
    """False: looking starts nothing; without a running replica it is refused."""


@dataclass(frozen=True, slots=True)
class Found:
    """A route, and what of the target its handler needs."""

    route: Route
    path: str
    """The path for the replica: as the table spells it, whatever spelling the client used."""
    query: str = ""
    """Raw, without the question mark."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path that are names, percent-decoded."""
    allow: str = ""
    """Methods of the path, as ``Allow`` lists them."""
    preflight: bool = False
    """The method is OPTIONS: answered by the gateway alone, before it asks who is there."""

    @property
    def upstream(self) -> str:
        """Path and query for the replica."""
        return f"{self.path}?{self.query}" if self.query else self.path


def _infer(path: str, summary: str, **more: object) -> Route:
    return Route(path, "POST", "replica", summary, **more)  # type: ignore[arg-type]


def _extra(path: str, summary: str) -> Route:
    return Route(path, "POST", "replica", summary, model="either")


def _own(method: str, path: str, serves: str, summary: str, auth: Auth = "none") -> Route:
    return Route(path, method, serves, summary, auth)


def _admin(method: str, path: str, serves: str, summary: str) -> Route:
    return Route(f"/admin/v1{path}", method, serves, summary, "admin")


def _response(method: str, path: str, summary: str) -> Route:
    return Route(f"/v1/responses/{{id}}{path}", method, "replica", summary, dialect="responses", model="hint", wakes=False)


TABLE: tuple[Route, ...] = (
    _infer("/v1/chat/completions", "Create a chat completion", events=True),
    _infer("/v1/completions", "Create a completion", events=True),
    _infer("/v1/embeddings", "Embed text"),
    _infer("/v1/responses", "Create a response", events=True, dialect="responses"),
    _response("GET", "", "Get a stored response"),
    _response("DELETE", "", "Delete a stored response"),
    _response("POST", "/cancel", "Cancel a response that runs in the background"),
    _infer("/v1/responses/input_tokens", "Count the tokens of a response's input", dialect="responses"),
    _infer("/v1/messages", "Create a message (Anthropic)", events=True, dialect="anthropic"),
    _infer("/v1/messages/count_tokens", "Count the tokens of a message (Anthropic)", dialect="anthropic"),
    _infer("/v1/moderations", "Classify text by policy"),
    _infer("/v1/images/generations", "Make images", events=True),
    _infer("/v1/images/edits", "Edit images", multipart=True, events=True),
    _infer("/v1/images/variations", "Vary an image", multipart=True),
    _infer("/v1/audio/speech", "Speak text"),
    _infer("/v1/audio/transcriptions", "Write down what is said", multipart=True, events=True),
    _infer("/v1/audio/translations", "Write down in English what is said", multipart=True, events=True),
    Route("/v1/realtime", "GET", "socket", "Talk over a WebSocket", model="hint"),
    *(_infer(path, "Order documents by relevance") for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking")),
    *(_infer(path, "Score pairs of texts") for path in ("/score", "/v1/score")),
    *(_infer(path, "Embed, in the engine's own shape") for path in ("/pooling", "/v2/embed")),
    *(_infer(path, "Classify text") for path in ("/classify", "/v1/classify")),
    _extra("/tokenize", "Tokens of a text"),
    _extra("/detokenize", "Text of tokens"),
    _extra("/apply-template", "Text of a chat"),
    _extra("/infill", "Fill in the middle of code"),
    Route("/completion", "POST", "replica", "Complete, in the engine's own shape", model="either", events=True),
    Route("/generate", "POST", "replica", "Generate, in the engine's own shape", model="either", events=True),
    _own("GET", "/v1/models", "models.list", "List the models, running or cold", "tenant"),
    _own("GET", "/v1/models/{name}", "models.get", "One model and its state", "tenant"),
    _own("GET", "/health", "health", "The process and its parts are alive"),
    _own("GET", "/ready", "ready", "New requests may be sent here"),
    _own("GET", "/metrics", "metrics", "Metrics for Prometheus"),
    _own("GET", "/openapi.json", "openapi", "This description"),
    _own("GET", "/console", "console.page", "The operator's console, a page for browsers"),
    _own("GET", "/console/{asset}", "console.asset", "What that page is made of"),
    _admin("GET", "/overview", "admin.overview", "Everything at a glance; waits for news"),
    _admin("GET", "/why", "admin.why", "Why a model or a replica is not what it should be"),
    _admin("GET", "/models", "admin.models", "Models, their state and demand"),
    _admin("GET", "/replicas", "admin.replicas", "Records of all replicas"),
    _admin("GET", "/hosts", "admin.hosts", "What each host is, as far as snapshots care"),
    _admin("GET", "/snapshots", "admin.snapshots", "What each host has"),
    _admin("POST", "/snapshots", "admin.create_snapshot", "Make a snapshot of a model"),
    _admin("POST", "/scale-up", "admin.scale_up", "Start replicas"),
    _admin("POST", "/scale-down", "admin.scale_down", "Drain and stop replicas"),
    _admin("POST", "/drain", "admin.drain", "Drain and stop one replica"),
    _admin("POST", "/move", "admin.move", "Start a replica on another host, then drain it here"),
    _admin("POST", "/reload", "admin.reload", "Read the configuration again"),
    _admin("POST", "/restart", "admin.restart", "Let successors take the workers' places"),
    _admin("GET", "/operations/{id}", "admin.operation", "Follow an operation"),
    _admin("POST", "/tasks", "admin.create_task", "Ask one host's restorer for something"),
    _admin("GET", "/tasks/{id}", "admin.task", "Follow a task; its result"),
)

_CONTROL = frozenset(
    (
        *("sleep", "wake_up", "is_sleeping", "collective_rpc", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"),
        *("pause", "resume", "is_paused", "update_weights", "init_weight_transfer_engine", "scale_elastic_ep", "server_info"),
        *("start_profile", "stop_profile", "load_lora_adapter", "unload_lora_adapter", "abort_requests", "abort_request"),
        *("flush_cache", "release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk"),
        *("update_weights_from_tensor", "update_weights_from_distributed", "slots", "props", "lora-adapters", "get_server_info"),
    )
)
"""Only for the wording of a 404: these are refused because they are not in the table, like everything else."""

_NAMES: Mapping[str, str] = {
    "{name}": r"(?P<name>.+)",
    "{id}": r"(?P<id>[A-Za-z0-9_-]+)",
    "{asset}": r"(?P<asset>[a-z]+\.[a-z]+)",
}


def _by_path() -> dict[str, dict[str, Route]]:
    paths: dict[str, dict[str, Route]] = {}
    for route in TABLE:
        paths.setdefault(route.name, {})[route.method] = route
    return paths


_PATHS = _by_path()
_LITERAL = [path for path in _PATHS if "{" not in path]
_PATTERNS = [
    (re.compile("".join(_NAMES.get(part, re.escape(part)) for part in re.split(r"(\{\w+\})", path))), path)
    for path in sorted(_PATHS, key=len, reverse=True)
    if "{" in path
]


def _allow(methods: Mapping[str, Route]) -> str:
    heads = ["HEAD"] if "GET" in methods and methods["GET"].serves not in ("replica", "socket") else []
    return ", ".join([*methods, *heads, "OPTIONS"])


_PLAIN = {
    (method, path): Found(route, path, allow=_allow(methods))
    for path, methods in _PATHS.items()
    if "{" not in path
    for method, route in methods.items()
}
"""The targets that nearly every request has, found in one step."""


_SERVER = Route("*", "OPTIONS", "options", "What the server can do at all", "none")


def find(method: str, target: str) -> Found:
    """The route of a request.

    A slash at the end is ignored. HEAD is found where the gateway itself answers GET; OPTIONS on every path.

    Args:
        target: as on the wire: path, and query if any; also with scheme and host in front.

    Raises:
        NotFound: no such path; the message says what was probably meant.
        MethodNotAllowed: the path has other methods; ``Allow`` lists them.
    """
    found = _PLAIN.get((method, target))
    if found is not None:
        return found
    path, _, query = _origin(target).partition("?")
    known = _lookup(path)
    if method == "OPTIONS" and target == "*":
        return Found(_SERVER, "*", allow="GET, HEAD, POST, DELETE, OPTIONS", preflight=True)
    if known is None:
        raise NotFound(_hint(path))
    template, params = known
    methods = _PATHS[template]
    allow = _allow(methods)
    route = methods.get("GET" if method == "HEAD" and "HEAD" in allow else method)
    if method == "OPTIONS":
        return Found(next(iter(methods.values())), template, query, params, allow, preflight=True)
    if route is None:
        raise MethodNotAllowed(f"{shown(method)} is not possible on {shown(path)}.", headers={"Allow": allow})
    return Found(route, _spelt(template, path), query, params, allow)


def shown(text: str) -> str:
    """A client's words for an error's message: short and printable."""
    plain = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:_SHOWN])
    return plain + "…" * (len(text) > _SHOWN)


def _origin(target: str) -> str:
    """The path and query of a target, which proxies may be sent with scheme and host."""
    match = re.match(r"(?i)https?://[^/?#]*", target)
    return target[match.end() :] or "/" if match else target


def _lookup(path: str) -> tuple[str, Mapping[str, str]] | None:
    plain = path.removesuffix("/") or "/"
    if plain in _PATHS and "{" not in plain:
        return plain, {}
    for pattern, template in _PATTERNS:
        match = pattern.fullmatch(plain)
        if match is not None:
            return template, {name: unquote(value) for name, value in match.groupdict().items()}
    return None


def _spelt(template: str, path: str) -> str:
    """The path for the replica; a name in it stays as the client wrote it: its alphabet is plain."""
    return template if "{" not in template else path.removesuffix("/")


def _hint(path: str) -> str:
    said = f"There is no path {shown(path)}."
    tidy = re.sub(r"/{2,}", "/", path)
    for wrong, meant in ((tidy.startswith("/v1/v1/"), re.sub(r"^(/v1)+(?=/v1/)", "", tidy)), (True, tidy), (True, "/v1" + tidy)):
        if wrong and meant != path and _lookup(meant) is not None:
            twice = " The base URL has /v1 twice." if meant != tidy and tidy.startswith("/v1/v1/") else ""
            return f"{said}{twice} Did you mean {shown(meant)}?"
    if path.strip("/").rpartition("/")[2] in _CONTROL:
        return f"{said} Routes that control an engine are not forwarded."
    near = difflib.get_close_matches(tidy.lower(), _LITERAL, 1, _NEAR) if len(tidy) <= _SHOWN else []
    return f"{said} Did you mean {near[0]}?" if near else said
