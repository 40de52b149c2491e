"""The two phases of a held request, in virtual time: when nothing is said, what is said, and how it ends."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway import dialects, hold
from gateway.claim import Refused
from gateway.downstream import ClientGone
from gateway.hold import Holding
from policies.admission import Reject
from policies.holding import Hold, UserAgent
from policies.replica import Replica, State

pytestmark = pytest.mark.looptime

REPLICA = Replica(id="m#0", model="m", state=State.ADMITTED, fence=1, incarnation="i")


class Claim:
    """A place that is granted, or refused, at a time told beforehand."""

    def __init__(self, at: float, refused: Refused | None = None) -> None:
        self._at = at
        self._refused = refused
        self.position = 3

    async def granted(self, within_s: float | None) -> Replica | None:
        now = asyncio.get_running_loop().time()
        if within_s is not None and now + within_s < self._at:
            await asyncio.sleep(within_s)
            return None
        await asyncio.sleep(self._at - now)
        if self._refused is not None:
            raise self._refused
        return REPLICA


class Down:
    """A client that notes when it got what."""

    version = (1, 1)

    def __init__(self, gone_at: float = float("inf")) -> None:
        self.heads: list[tuple[float, int, dict[str, str]]] = []
        self.pieces: list[tuple[float, bytes]] = []
        self._gone_at = gone_at

    @property
    def begun(self) -> bool:
        return bool(self.heads)

    async def head(self, status, reason, headers) -> None:
        self.heads.append((self._now(), status, dict(headers)))

    async def write(self, data) -> None:
        self.pieces.append((self._now(), data))

    def _now(self) -> float:
        now = round(asyncio.get_running_loop().time(), 3)
        if now >= self._gone_at:
            raise ClientGone
        return now


class Eta:
    def wait_s(self, model: str, position: int) -> float | None:
        return max(0.0, 40.0 - asyncio.get_running_loop().time())


def exactly() -> float:
    """No spread."""
    return 0.0


def holding(mode="comment", dialect=dialects.CHAT) -> Holding:
    return Holding("m", Hold(silent_s=20, keepalive_s=12), dialect, mode, "req_1", asyncio.get_running_loop().time() + 20)


async def test_nothing_is_said_in_the_silent_phase():
    down = Down()
    assert await hold.until_granted(holding(), Claim(19.0), down, Eta(), exactly) is REPLICA
    assert not down.begun


async def test_case_34_then_comments_tell_place_and_time_well_within_a_minute():
    down = Down()
    held = holding()
    assert await hold.until_granted(held, Claim(50.0), down, Eta(), exactly) is REPLICA
    assert asyncio.get_running_loop().time() == pytest.approx(50.0)
    ((at, status, headers),) = down.heads
    assert (at, status, headers["Content-Type"]) == (20.0, 200, "text/event-stream; charset=utf-8")
    assert (headers["Cache-Control"], headers["X-Accel-Buffering"], headers["x-request-id"]) == ("no-cache", "no", "req_1")
    assert "Content-Length" not in headers
    assert down.pieces == [
        (20.0, b": queued position=3 eta=20\n\n"),
        (32.0, b": queued position=3 eta=8\n\n"),
        (44.0, b": queued position=3 eta=0\n\n"),
    ]
    assert held.committed


async def test_those_who_came_together_are_not_told_together():
    """Ten thousand signs in one turn of the loop would stall everybody else."""
    downs = [Down() for _ in range(50)]
    await asyncio.gather(*(hold.until_granted(holding(), Claim(70.0), down, Eta()) for down in downs))
    third = [down.pieces[2][0] for down in downs]
    assert len(set(third)) > 40
    pauses = [b - a for down in downs for (a, _), (b, _) in itertools.pairwise(down.pieces)]
    assert all(10 <= pause <= 12.01 for pause in pauses)


async def test_defaults_keep_every_silence_below_the_30_s_of_load_balancers():
    assert Hold().silent_s < 30
    assert 10 <= Hold().keepalive_s <= 15


async def test_case_37_off_says_nothing_however_long():
    down = Down()
    await hold.until_granted(holding("off"), Claim(500.0), down, Eta(), exactly)
    assert not down.begun


async def test_case_38_chunks_are_sent_only_where_they_are_asked_for():
    assert Hold().keepalive == "comment"
    down = Down()
    await hold.until_granted(holding("chunk"), Claim(25.0), down, Eta(), exactly)
    ((_, piece),) = down.pieces
    assert b'"content": ""' in piece


@pytest.mark.parametrize("at", [19.0, 50.0])
async def test_a_refusal_is_raised_in_both_phases(at):
    down = Down()
    with pytest.raises(Refused):
        await hold.until_granted(holding(), Claim(at, Refused(Reject("cold_start_timeout"))), down, Eta(), exactly)
    assert down.begun is (at > 20)


async def test_a_client_that_went_is_noticed_by_the_next_sign():
    with pytest.raises(ClientGone):
        await hold.until_granted(holding(), Claim(500.0), Down(gone_at=30), Eta(), exactly)
    assert asyncio.get_running_loop().time() == pytest.approx(32.0)


async def test_a_second_wait_goes_on_where_the_first_was():
    """Its replica could not be reached: the silence is not begun anew, and no second head is sent."""
    down, held = Down(), holding()
    await hold.until_granted(held, Claim(15.0), down, Eta(), exactly)
    await hold.until_granted(held, Claim(25.0), down, Eta(), exactly)
    assert [at for at, *_ in down.heads] == [20.0]
    await hold.until_granted(held, Claim(30.0), down, Eta(), exactly)
    assert [at for at, _ in down.pieces] == [20.0, 25.0]
    assert len(down.heads) == 1


@pytest.mark.parametrize(
    ("events", "version", "agent", "dialect", "mode"),
    [
        (True, (1, 1), "OpenAI/Python", dialects.CHAT, "comment"),
        (False, (1, 1), "OpenAI/Python", dialects.CHAT, "off"),
        (True, (1, 0), "OpenAI/Python", dialects.CHAT, "off"),
        (True, (1, 1), "langchaingo/0.1", dialects.CHAT, "off"),
        (True, (1, 1), "mistral-vibe", dialects.CHAT, "chunk"),
        (True, (1, 1), "mistral-vibe", dialects.OPENAI, "off"),
    ],
)
async def test_who_is_told_what(events, version, agent, dialect, mode):
    """Never one whose answer could not be broken off visibly, nor one whose API has no empty chunk."""
    exceptions = (UserAgent(pattern="^langchaingo", keepalive="off"), UserAgent(pattern="mistral", keepalive="chunk"))
    settings = Hold(user_agents=exceptions)
    assert hold.mode_for(settings, user_agent=agent, events=events, version=version, dialect=dialect, model="m") == mode
