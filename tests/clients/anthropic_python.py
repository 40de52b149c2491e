"""The `anthropic` package as an application uses it: ``anthropic_python.py BASE_URL (KEY SCENARIO MODEL)...``.

Prints one JSON object a line: what the application saw in each scenario.
"""

import json
import sys
from typing import Any

import anthropic

SAY: Any = [{"role": "user", "content": "Say hello."}]


def chat(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    answer = client.messages.create(model=model, max_tokens=8, messages=SAY, extra_body={"temperature": 0})
    return {"text": "".join(block.text for block in answer.content if block.type == "text"), "id": answer._request_id}


def stream(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    with client.messages.stream(model=model, max_tokens=8, messages=SAY, extra_body={"temperature": 0}) as events:
        return {"text": "".join(events.text_stream)}


SCENARIOS = {f.__name__: f for f in (chat, stream)}


def see(base: str, key: str, scenario: str, model: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=key)
    try:
        return SCENARIOS[scenario](client, model)
    except anthropic.APIStatusError as error:
        kind = (error.body or {}).get("error", {}).get("type") if isinstance(error.body, dict) else None
        return {"error": type(error).__name__, "status": error.status_code, "type": kind, "id": error.request_id}
    except anthropic.APIError as error:
        return {"error": type(error).__name__, "message": str(error)}


base, *asked = sys.argv[1:]
for key, scenario, model in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
    print(json.dumps(see(base, key, scenario, model)), flush=True)
