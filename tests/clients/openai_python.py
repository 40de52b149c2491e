"""The `openai` package, old or new, as an application uses it: ``openai_python.py BASE_URL (KEY SCENARIO MODEL)...``.

Prints one JSON object a line: what the application saw in each scenario. An error is what the SDK raised, no failure of ours.
"""

import json
import sys
from typing import Any

import openai

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SAY: Any = [{"role": "user", "content": "Say hello."}]
EXACT: Any = {"temperature": 0, "seed": 1}


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    answer = client.chat.completions.create(model=model, messages=SAY, max_tokens=8, **EXACT)
    return {"text": answer.choices[0].message.content, "id": answer._request_id, "tokens": answer.usage.completion_tokens}


def stream(client: openai.OpenAI, model: str) -> dict[str, Any]:
    parts, count = "", 0
    for chunk in client.chat.completions.create(model=model, messages=SAY, max_tokens=8, stream=True, **EXACT):
        count += 1
        parts += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return {"text": parts, "chunks": count}


def tools(client: openai.OpenAI, model: str) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=64,
        **EXACT,
    )
    return {"calls": [call.function.name for call in answer.choices[0].message.tool_calls or []]}


def completion(client: openai.OpenAI, model: str) -> dict[str, Any]:
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4, **EXACT)
    return {"text": answer.choices[0].text}


def embeddings(client: openai.OpenAI, model: str) -> dict[str, Any]:
    answer = client.embeddings.create(model=model, input=["one", "two"])
    return {"vectors": [len(item.embedding) for item in answer.data]}


def models(client: openai.OpenAI, model: str) -> dict[str, Any]:
    return {"ids": [item.id for item in client.models.list()], "one": client.models.retrieve(model).id}


SCENARIOS = {f.__name__: f for f in (chat, stream, tools, completion, embeddings, models)}


def see(base: str, key: str, scenario: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=base, api_key=key)
    try:
        return SCENARIOS[scenario](client, model)
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "status": error.status_code, "code": error.code, "id": error.request_id}
    except openai.APIError as error:
        return {"error": type(error).__name__, "code": error.code, "message": str(error)}


base, *asked = sys.argv[1:]
for key, scenario, model in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
    print(json.dumps(see(base, key, scenario, model)), flush=True)
