"""The `anthropic` package as an application uses it: ``anthropic_python.py BASE_URL KEY SCENARIO MODEL``.

Prints one JSON object: what the application saw.
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


def main() -> None:
    base, key, scenario, model = sys.argv[1:]
    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=key)
    try:
        seen = SCENARIOS[scenario](client, model)
    except anthropic.APIStatusError as error:
        kind = (error.body or {}).get("error", {}).get("type") if isinstance(error.body, dict) else None
        seen = {"error": type(error).__name__, "status": error.status_code, "type": kind, "id": error.request_id}
    except anthropic.APIError as error:
        seen = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({"client": f"anthropic {anthropic.__version__}", **seen}))


main()
