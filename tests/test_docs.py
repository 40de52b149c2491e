"""The documents do what they say: every command in them is run, or there is a reason why not, and then it is checked otherwise.

One installation with the real CRIU and a real engine serves all pages; each page's commands run in their own shell, in order.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_blocks import Block, blocks, every_block, pages
from e2e_installation import needed

from deploy.site import commands
from policies import config

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = every_block()
RUN = [page for page in pages() if any(block.shell and not block.why_not for block in blocks(page))]
LEFT = [block for block in BLOCKS if block.shell and block.why_not]
_RUN_S = 420
MINIMAL = "models: {my-model: {engine: {kind: http, command: [/bin/true]}}}"
_PROMPT = json.dumps({"model": "my-model", "prompt": "The capital of France is", "max_tokens": 4})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---------------------------------------------------------------- commands that are run


def script() -> str:
    """For the sandbox: an installation that has captured and restored its model once, then each page in a shell of its own."""
    settings = yaml.safe_load((ROOT / "deploy/examples/starter.yaml").read_text())
    settings["gateway"]["user"] = "nobody"
    settings["models"]["my-model"]["engine"]["command"] += ["--threads", "1", "--ctx-size", "512", "--parallel", "1"]
    settings["models"]["my-model"]["canary"] = {"max_tokens": 4, "prompts": ["The capital of France is", "One, two,"]}
    lines = [
        "set -u",
        f"cat >/etc/rewake/rewake.yaml <<'END'\n{yaml.safe_dump(settings)}END",
        "rewake up >/tmp/docs/up.log 2>&1 & up=$!",
        "for _ in $(seq 120); do curl -sf 127.0.0.1:8080/ready >/dev/null && break; sleep 0.25; done",
        f"curl -sS --max-time 120 127.0.0.1:8080/v1/completions -H 'content-type: application/json' -d {shlex.quote(_PROMPT)} "
        ">/tmp/docs/first.json 2>&1",
    ]
    for number, page in enumerate(RUN):
        lines.append(f"cat >/tmp/page-{number}.sh <<'END-OF-PAGE'\n{_of(page)}END-OF-PAGE")
        lines.append(f"bash -eu /tmp/page-{number}.sh >/tmp/docs/{number}.log 2>&1; echo $? >/tmp/docs/{number}.rc")
    lines += ["kill $up", "wait $up", "echo $? >/tmp/docs/up.rc"]
    return "\n".join(lines) + "\n"


def _of(page: Path) -> str:
    said = []
    for block in blocks(page):
        if block.shell and not block.why_not:
            said += [f"echo '### {block}'", "PS4='+ $SECONDS s: '; set -x", block.text.rstrip(), "{ set +x; } 2>/dev/null"]
    return "\n".join(said) + "\n"


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where each page left what it said, and its exit status."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    environ = {each: needed(each) for each in ("REWAKE_CRIU", "REWAKE_LLAMA_SERVER", "REWAKE_MODEL")}
    folder = tmp_path_factory.mktemp("docs")
    for each in ("layer", "state", "out"):
        (folder / each).mkdir()
    (folder / "out/script.sh").write_text(script())
    argv = [ROOT / "tests/docs_sandbox.sh", ROOT, folder, "/tmp/docs/script.sh"]
    with (folder / "out/sandbox.log").open("w") as log:
        more = {**os.environ, **environ, "REWAKE_PYTHON": sys.executable}
        subprocess.run(argv, stdout=log, stderr=log, timeout=_RUN_S, check=False, env=more, stdin=subprocess.DEVNULL)
    yield folder / "out"
    shutil.rmtree(folder / "state", ignore_errors=True)


def log(folder: Path, file: str) -> str:
    path = folder / file
    return path.read_text(errors="replace")[-6000:] if path.exists() else f"no {file}"


@pytest.mark.criu
def test_the_installation_of_the_documents_serves_and_ends_well(ran: Path) -> None:
    assert log(ran, "up.rc") == "0\n", log(ran, "sandbox.log") + log(ran, "up.log")
    assert "choices" in log(ran, "first.json"), log(ran, "up.log")


@pytest.mark.criu
@pytest.mark.parametrize("number", range(len(RUN)), ids=[name(page) for page in RUN])
def test_the_commands_of_a_page_work(number: int, ran: Path) -> None:
    assert log(ran, f"{number}.rc") == "0\n", log(ran, f"{number}.log") + log(ran, "sandbox.log")


# ---------------------------------------------------------------- commands that are not


@pytest.mark.parametrize("block", LEFT, ids=str)
def test_what_is_not_run_is_shell_all_the_same(block: Block) -> None:
    assert len(block.why_not) > 5, "say why"
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{block}: {checked.stderr}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.shell], ids=str)
def test_commands_and_targets_exist(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        for words in _simple(line):
            _exists(words, str(block))


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_outside_of_blocks_exist_too(page: Path) -> None:
    """Within backticks, and in lines that are set in."""
    text = page.read_text()
    for said in re.findall(r"`((?:rewake|make) [a-z][^`\n]*)`", text) + re.findall(
        r"^ {4}((?:rewake|make) .*)$", text, re.MULTILINE
    ):
        for words in _simple(said):
            _exists(words, f"{name(page)}: {said}")


def _simple(line: str) -> Iterator[list[str]]:
    """The commands of a line, as words; comments and what a shell puts around are left out."""
    for part in re.split(r"&&|\|\||[|;]|(?<!\S)#.*$", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # a quote that ends on another line
            continue
        while words and (re.fullmatch(r"\w+=\S*", words[0]) or words[0] in ("sudo", "$", "exec", "env", "time")):
            words.pop(0)
        if words:
            yield words


def _exists(words: list[str], where: str) -> None:
    program, *arguments = words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = [each for each in arguments if not each.startswith("-") and "=" not in each]
        assert set(named) <= targets, where
    elif program.rpartition("/")[2] == "rewake":
        _rewake(arguments, where)
    elif re.match(r"(deploy|tests|\.ci)/", program):
        assert (ROOT / program).exists(), where


KNOWN: Mapping[str, Any] = dict(commands.commands())


def _rewake(arguments: list[str], where: str) -> None:
    """The command is one, and has the options."""
    if not arguments or arguments[0].startswith("-"):
        return
    words = ["rewake", *arguments]
    found = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in KNOWN), None)
    groups = {each.split()[1] for each in KNOWN if each.count(" ") == 2}
    assert found or (arguments[0] in groups and len(arguments) == 1), f"{where}: there is no `rewake {arguments[0]}`"
    if found:
        known = {option for one in KNOWN[found].params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        given = {re.match(r"--?[A-Za-z-]+", each)[0] for each in arguments if re.match(r"--?[A-Za-z]", each)}  # type: ignore[index]
        assert given <= known, f"{where}: {found} has no {', '.join(given - known)}"


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml" and not block.why_not], ids=str)
def test_yaml_is_configuration(block: Block) -> None:
    """Whole, or sections of one: then the rest is the least that there can be."""
    document = yaml.safe_load(block.text.replace("@JOB@", "1"))
    assert isinstance(document, dict)
    minimal = yaml.safe_load(MINIMAL)
    for model in (document.get("models") or {}).values():
        if "engine" not in model or "command" not in model["engine"]:
            model["engine"] = {**minimal["models"]["my-model"]["engine"], **model.get("engine", {})}
        if "group" in model:
            document.setdefault("groups", {}).setdefault(model["group"], {})
    for tenant in (document.get("tenants") or {}).values():
        for model in tenant.get("models") or []:
            minimal["models"][model] = minimal["models"]["my-model"]
    assert config.parse({**minimal, **document})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "python" and not block.why_not], ids=str)
def test_python_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec")
