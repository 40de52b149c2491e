"""The settings a model would be started with now, resolved to what can be compared: every weights file by its hash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from policies import secrets
from policies.config import Model
from policies.manifest import Profile
from policies.trust import TRUST, Trust
from policies.warmup import Warmup
from restorer.adapters.engines import adapter
from restorer.errors import Environment
from restorer.storage.stamps import Stamps


def resolve(name: str, model: Model, stamps: Stamps, trust: Trust = TRUST) -> Profile:
    """The profile of a model as configured, secrets hidden in it. Reads weights that are new or changed, so call it in a thread.

    Raises:
        Environment: a weights path is missing, empty or unreadable; the message names the setting and the path.
    """
    # The bundle's configuration makes it another engine; the files of its root are looked at as far as they are used.
    bundle = () if model.engine.bundle is None else (Path(model.engine.bundle) / "config.json",)
    paths = sorted({*bundle, *(path for given in model.weights for path in _files(name, Path(given)))})
    hashes = {}
    for path, found in stamps.sha256_all(paths).items():
        if isinstance(found, OSError):
            raise _unusable(name, path, f"cannot be read: {found.strerror or found}")
        hashes[str(path)] = found
    engine = adapter(name, model)
    return Profile(
        model=name,
        engine=model.engine.kind,
        command=secrets.hidden_argv(engine.argv(), trust),
        env=secrets.hidden(engine.settings(), trust),
        port=model.engine.port,
        weights=hashes,
        gpus=engine.gpus or None,
        warmup=None if model.warmup == Warmup() else model.warmup.model_dump(mode="json", exclude={"timeout_s"}),
        backend=None if model.engine.backend == "criu" else model.engine.backend,
    )


def _files(name: str, path: Path) -> list[Path]:
    if path.is_dir():
        found = list(_walk(path, frozenset()))
        if not found:
            raise _unusable(name, path, "is a folder without files")
        return found
    if not path.exists():
        raise _unusable(name, path, "does not exist")
    return [path]


def _walk(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Every file under a folder. Symlinks are followed, as engines do (model caches are made of them), loops are not."""
    facts = folder.stat()
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path), above | {here})
            else:
                yield Path(entry.path)


def _unusable(name: str, path: Path, why: str) -> Environment:
    return Environment(f"models.{name}.weights: {path} {why}; put the weights there, or correct the setting")
