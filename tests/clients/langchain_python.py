"""The `langchain-openai` package as an application uses it: ``langchain_python.py BASE_URL (KEY SCENARIO MODEL)...``.

Prints one JSON object a line: what the application saw in each scenario.
"""

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def _chat(base: str, key: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=base, api_key=key, temperature=0, seed=1, max_tokens=8)


def chat(*target: str) -> dict[str, Any]:
    return {"text": _chat(*target).invoke("Say hello.").content}


def stream(*target: str) -> dict[str, Any]:
    chunks = [chunk.content for chunk in _chat(*target).stream("Say hello.")]
    return {"text": "".join(chunks), "chunks": len(chunks)}


def embeddings(base: str, key: str, model: str) -> dict[str, Any]:
    found = OpenAIEmbeddings(model=model, base_url=base, api_key=key, check_embedding_ctx_length=False).embed_documents(
        ["one", "two"]
    )
    return {"vectors": [len(vector) for vector in found]}


SCENARIOS = {f.__name__: f for f in (chat, stream, embeddings)}


def see(base: str, key: str, scenario: str, model: str) -> dict[str, Any]:
    try:
        return SCENARIOS[scenario](base, key, model)
    except openai.APIError as error:
        return {"error": type(error).__name__, "status": getattr(error, "status_code", None), "code": error.code}


base, *asked = sys.argv[1:]
for key, scenario, model in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
    print(json.dumps(see(base, key, scenario, model)), flush=True)
