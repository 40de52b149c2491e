"""Questions and chores for one host's restorer: made here, answered there, followed to their end.

Which kinds there are is :mod:`policies.tasks`'s. Knows nothing of who may ask.
"""

from __future__ import annotations

import secrets
import time

from gateway.errors import Busy
from gateway.operations import Events, settled
from gateway.store import Store
from policies.tasks import CHORES, Task, TaskState


class Tasks:
    """Every method raises :class:`gateway.errors.StoreUnavailable`.

    Args:
        events: tells when something about a task may have changed.
    """

    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._events = events

    async def create(self, task: Task) -> Task:
        """Ask; the task with its id.

        Raises:
            Busy: too much waits for that host already.
        """
        now_ms = time.time_ns() // 1_000_000
        made = task.model_copy(update={"id": f"task-{secrets.token_hex(8)}", "created_ms": now_ms, "updated_ms": now_ms})
        if not await self._store.create_task(made):
            raise Busy(f"Too many tasks wait for the restorer on {task.host}; ask again when it has got on.")
        if made.kind in CHORES:
            await self._store.note(made.id, now_ms)
        return made

    async def wait(self, id: str, timeout_s: float) -> Task | None:
        """The task once it has ended, or as it is after ``timeout_s`` seconds; None: there is none, or not any more."""
        return await settled(
            self._events, id, lambda: self._store.task(id), lambda task: task.state is TaskState.RUNNING, timeout_s
        )
