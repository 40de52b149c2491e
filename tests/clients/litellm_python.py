"""The `litellm` package as an application uses it: ``litellm_python.py BASE_URL (KEY SCENARIO MODEL)...``.

Prints one JSON object a line: what the application saw in each scenario.
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices

import litellm
import openai

SAY: Any = [{"role": "user", "content": "Say hello."}]


def chat(target: dict[str, Any]) -> dict[str, Any]:
    answer = litellm.completion(messages=SAY, max_tokens=8, temperature=0, seed=1, **target)
    return {"text": answer.choices[0].message.content, "tokens": answer.usage.completion_tokens}


def stream(target: dict[str, Any]) -> dict[str, Any]:
    parts, count = "", 0
    for chunk in litellm.completion(messages=SAY, max_tokens=8, temperature=0, seed=1, stream=True, **target):
        count += 1
        parts += chunk.choices[0].delta.content or ""
    return {"text": parts, "chunks": count}


def embeddings(target: dict[str, Any]) -> dict[str, Any]:
    answer = litellm.embedding(input=["one", "two"], **target)
    return {"vectors": [len(item["embedding"]) for item in answer.data]}


SCENARIOS = {f.__name__: f for f in (chat, stream, embeddings)}


def see(base: str, key: str, scenario: str, model: str) -> dict[str, Any]:
    try:
        return SCENARIOS[scenario]({"model": f"openai/{model}", "api_base": base, "api_key": key})
    except openai.APIError as error:
        return {"error": type(error).__name__, "status": getattr(error, "status_code", None), "code": error.code}


litellm.suppress_debug_info = True
base, *asked = sys.argv[1:]
for key, scenario, model in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
    print(json.dumps(see(base, key, scenario, model)), flush=True)
