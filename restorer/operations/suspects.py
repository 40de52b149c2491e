"""What becomes of a replica that gateways suspect: it is asked itself, and replaced if it does not answer.

A process that lives is no proof that an engine works: it may accept connections and never answer. Gateways see that first,
but a gateway may be wrong, or cut off, so the restorer asks its own questions: the engine's health, then one token. An
answer may take long when the engine is busy; how long is the operator's word (``first_byte_timeout_s``), or, when nothing is
in flight, far more than its canary took.
"""

from __future__ import annotations

import asyncio
import functools
import time

from policies.replica import Replica
from restorer.adapters.engines import HttpEngine
from restorer.errors import EngineDied, EngineNotReady, RestorerError, StoreUnavailable
from restorer.machine.host import Host, log
from restorer.operations.instance import connect
from restorer.operations.replicas import Replicas, Running

_TRIES = 3
"""Refusals, or silent health checks, in a row."""
_PAUSE_S = 1.0
_LEAST_S = 10.0
_TIMES = 10.0
"""An idle engine has this many times as long for one token as its start took to prove itself, and at least _LEAST_S."""
_PROOFS = ("canary", "warm up")


class Suspects:
    """One per restorer. :meth:`look` is called about every second."""

    def __init__(self, host: Host, replicas: Replicas) -> None:
        self._host = host
        self._replicas = replicas
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Begin to ask each suspect of this host that is not being asked already.

        Raises:
            StoreUnavailable: nothing was begun.
        """
        admitted = self._replicas.admitted()
        for incarnation, reason in (await self._host.jobs.suspects(admitted)).items():
            if incarnation not in self._asking:
                task = asyncio.create_task(self._ask(admitted[incarnation], reason))
                self._asking[incarnation] = task
                task.add_done_callback(functools.partial(self._asked, incarnation))

    def _asked(self, incarnation: str, _: asyncio.Task[None]) -> None:
        del self._asking[incarnation]

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, running: Running, reason: str) -> None:
        record = running.record
        log.warning("replica %s (%s) is suspected: %s", record.id, record.incarnation, reason)
        try:
            fault = await self._fault(running)
            if fault is None:
                log.info("replica %s (%s) answers: it stays", record.id, record.incarnation)
            else:
                await self._replicas.fail(record.incarnation, f"hung: {fault} (a gateway had said: {reason})")
        except EngineDied:
            log.info("replica %s (%s) has ended meanwhile", record.id, record.incarnation)
        except RestorerError as error:
            log.error("suspect %s (%s): %s", record.id, record.incarnation, error)

    async def _fault(self, running: Running) -> str | None:
        """What is wrong with it; None when it answers.

        Raises:
            EngineDied: it ended by itself, which is noticed elsewhere.
        """
        record, engine = running.record, running.instance.engine
        begun, refused = time.monotonic(), 0
        async with connect(running.instance) as client:
            for _ in range(_TRIES):
                if await engine.ready(client):
                    break
                await asyncio.sleep(_PAUSE_S)
            else:
                return f"its health was asked {_TRIES} times, and was not good once"
            while True:
                busy = await self._busy(record)
                limit_s = engine.model.canary.timeout_s if busy else _idle_limit_s(record, engine)
                try:
                    async with asyncio.timeout(limit_s):
                        await engine.warm(client)
                    return None
                except TimeoutError:
                    fault, refused = f"no token came within {limit_s:g} s", _TRIES
                except EngineNotReady as error:
                    fault, refused = str(error), refused + 1
                if time.monotonic() - begun >= engine.model.first_byte_timeout_s or (refused >= _TRIES and not busy):
                    return fault
                await asyncio.sleep(_PAUSE_S)

    async def _busy(self, record: Replica) -> bool:
        """Some gateway has a request in flight on it, or nobody can say."""
        try:
            return any(report.replicas.get(record.incarnation, 0) for report in await self._host.jobs.gateways())
        except StoreUnavailable:
            return True


def _idle_limit_s(record: Replica, engine: HttpEngine) -> float:
    proof_s = max((stage.seconds for stage in record.stages if stage.name in _PROOFS), default=0.0)
    return min(engine.model.canary.timeout_s, max(_LEAST_S, _TIMES * proof_s))
