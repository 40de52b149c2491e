"""What is said of a restore when it has ended: how it was read, what it took, and what it would have taken at the least."""

from __future__ import annotations

import logging
from typing import Any

from policies import floor, reading
from policies.floor import Rates
from policies.manifest import Manifest
from policies.replica import Replica
from restorer.records.stages import Stages

log = logging.getLogger("rewake.restorer")


def reckoned(
    stages: Stages, manifest: Manifest | None, settings: reading.Restore, rates: Rates | None, choices: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Changes to the record of a replica that is about to be admitted; its stages get their floors.

    Args:
        manifest: of the snapshot that it comes from; None: it was started another way, and there is nothing to say.
        choices: those made before it was read.
    """
    found: dict[str, Any] = {"took_s": round(stages.elapsed_s, 6)}
    if manifest is None:
        return found
    found["choices"] = (*choices, *reading.choices(settings, manifest, rates, alone=stages.alone))
    if rates is not None:
        apart = floor.apart_bytes(manifest)
        stages.done, found["floor_s"] = floor.judged(stages.done, rates, canary_s=manifest.canary_s, apart_bytes=apart)
    return found


def told(record: Replica) -> None:
    """Say in the log where the time of a restored replica went."""
    if (account := floor.account(record)) is not None:
        log.info("%s was restored: %s", record.id, account.text)
