"""A door: the small process through which gateways of other hosts reach one box. Runs alone, on the standard library.

Started by :mod:`restorer.boxes.doors` as ``python -I -S door.py TARGET ALLOW CONNECTIONS USER LISTENER BOX COUNTS``, outside
of the box's namespaces, with three inherited descriptors: a listening socket, a pidfd of the box's pid 1, a file to count in.
It

1. becomes USER, for good, without a right of any kind, and prints ``ready``;
2. waits at its gate, which is stdin: a port there lets clients in; its end without one means that nobody will;
3. passes bytes on between whoever connects and TARGET at that port, both ways, as they come: what one side does not take, the
   other is not asked for; the end of one direction is passed on as such, an error as a reset, so that nothing broken looks whole;
4. ends when the box has ended. It does not end with the restorer: streams go on.

Plain bytes: it knows nothing of HTTP, replicas or models. One thread, no queue but one piece per direction.
"""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import os
import pwd
import resource
import select
import socket
import struct
import sys
import time

PIECE = 128 << 10
"""Bytes that are held for one direction of one connection, at most."""
COUNTS = struct.Struct("=5Q")
"""Connections passed on so far, open now, shut out for where they came from, for their number, and for the engine's refusal."""
_OPENED, _OPEN, _BARRED, _FULL, _REFUSED = range(5)
_PR_SET_NO_NEW_PRIVS = 38
_AT_ONCE = 64
_FEW_FILES = 32
_RESET = struct.pack("ii", 1, 0)
_LAST_ROUNDS = 1000
_PAUSE_S = 0.05
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_TRIES = 3
"""To be heard by the engine, within some seconds: its host is this one."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Who vanished without a word is noticed after half a minute of silence."""


class Side:
    """One of the two ends of a connection."""

    __slots__ = ("ended", "events", "linked", "owed", "peer", "shut", "sock")

    def __init__(self, sock: socket.socket, *, linked: bool) -> None:
        self.sock = sock
        self.linked = linked
        self.peer = self
        self.owed = b""
        """What it has not taken yet."""
        self.ended = False
        """Nothing more comes from it."""
        self.shut = False
        """It was told that nothing more comes."""
        self.events = 0


class Door:
    """All connections of one box."""

    def __init__(self, listener: socket.socket, box: int, counts: mmap.mmap, allow: list[str], connections: int) -> None:
        self._listener, self._box, self._mapped = listener, box, counts
        self._allow = [ipaddress.ip_network(one) for one in allow]
        self._connections = connections
        self._counts = [*COUNTS.unpack_from(counts)]
        self._counts[_OPEN] = 0
        self._sides: dict[int, Side] = {}
        self._poll = select.epoll()
        self._piece = memoryview(bytearray(PIECE))
        self._target: tuple[str, int] = ("", 0)
        self._count()

    def run(self, target: tuple[str, int]) -> None:
        """Until the box has ended, and what had come out of it is passed on."""
        self._target = target
        self._listener.setblocking(False)
        listening = self._listener.fileno()
        self._poll.register(listening, _IN)
        self._poll.register(self._box, _IN)
        sides, poll = self._sides, self._poll.poll
        alive = True
        while alive:
            knock = False
            for fd, events in poll(-1, _AT_ONCE):
                if (side := sides.get(fd)) is not None:
                    self._ready(side, events)
                elif fd == listening:
                    knock = True
                elif fd == self._box:
                    alive = False
            if knock:
                # Only now: a descriptor that was closed meanwhile is used again, and its last events must not be a stranger's.
                self._accept()
        self._poll.unregister(self._box)
        self._poll.unregister(listening)
        self._listener.close()
        for _ in range(_LAST_ROUNDS):
            found = poll(0)
            if not found:
                break
            for fd, events in found:
                if (side := sides.get(fd)) is not None:
                    self._ready(side, events)
        for side in list(sides.values()):
            self._drop(side)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # No descriptor or memory to be had: it stays in the queue for a moment.
                time.sleep(_PAUSE_S)
                return
            why = self._barred(peer[0])
            if why is not None:
                self._counts[why] += 1
                self._count()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
            else:
                self._begin(client)

    def _barred(self, peer: str) -> int | None:
        address = ipaddress.ip_address(peer.partition("%")[0])
        if not any(address in network for network in self._allow):
            return _BARRED
        return _FULL if self._counts[_OPEN] >= self._connections else None

    def _begin(self, client: socket.socket) -> None:
        engine = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for one in (client, engine):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _TRIES)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            client.setsockopt(socket.IPPROTO_TCP, option, value)
        near, far = Side(client, linked=True), Side(engine, linked=False)
        near.peer, far.peer = far, near
        self._sides[client.fileno()], self._sides[engine.fileno()] = near, far
        self._counts[_OPENED] += 1
        self._counts[_OPEN] += 1
        self._count()
        try:
            engine.connect(self._target)
        except BlockingIOError:
            pass
        except OSError:
            return self._refused(far)
        # Until it is connected nobody listens to the client.
        self._want(far, _OUT)

    def _ready(self, side: Side, events: int) -> None:
        try:
            if not side.linked:
                return self._link(side)
            if events & _OUT:
                self._go_on(side)
            if events & ~_OUT and side.events & _IN:
                # An error or a hang-up is found out by reading, in its turn.
                self._pass_on(side)
            elif events & ~(_OUT | _IN):
                self._drop(side)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(side)

    def _link(self, engine: Side) -> None:
        """It has been connected, or not."""
        if engine.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return self._refused(engine)
        engine.linked = True
        self._want(engine, _IN)
        self._want(engine.peer, _IN)

    def _refused(self, engine: Side) -> None:
        self._counts[_REFUSED] += 1
        self._drop(engine)

    def _pass_on(self, side: Side) -> None:
        """Something is there to be read: to the other side with it."""
        piece, peer = self._piece, side.peer
        size = side.sock.recv_into(piece)
        if not size:
            side.ended = True
            self._want(side, side.events & ~_IN)
            return self._end_of(side)
        try:
            sent = peer.sock.send(piece[:size])
        except BlockingIOError:
            sent = 0
        if sent < size:
            peer.owed = bytes(piece[sent:size])
            self._want(side, side.events & ~_IN)
            self._want(peer, peer.events | _OUT)

    def _go_on(self, side: Side) -> None:
        """It takes more of what it is owed."""
        side.owed = side.owed[side.sock.send(side.owed) :]
        if not side.owed:
            self._want(side, side.events & ~_OUT)
            self._want(side.peer, side.peer.events | _IN)

    def _end_of(self, side: Side) -> None:
        """Nothing more comes from it, and all that came was taken: tell the other one."""
        side.peer.shut = True
        side.peer.sock.shutdown(socket.SHUT_WR)
        if side.shut:
            self._close(side, whole=True)

    def _drop(self, side: Side) -> None:
        if self._sides.get(side.sock.fileno()) is side:
            self._close(side, whole=False)

    def _close(self, side: Side, *, whole: bool) -> None:
        self._counts[_OPEN] -= 1
        self._count()
        for one in (side, side.peer):
            self._want(one, 0)
            del self._sides[one.sock.fileno()]
            if not whole:
                one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.sock.close()

    def _want(self, side: Side, events: int) -> None:
        """What is asked of the kernel about this side; nothing means nothing, hang-ups included."""
        if events == side.events:
            return
        fd = side.sock.fileno()
        if not events:
            self._poll.unregister(fd)
        elif side.events:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        side.events = events

    def _count(self) -> None:
        COUNTS.pack_into(self._mapped, 0, *self._counts)


def _become(user: str) -> None:
    """Another user, without groups, capabilities, or a way to any."""
    found = pwd.getpwnam(user)
    os.setgroups([])
    os.setresgid(found.pw_gid, found.pw_gid, found.pw_gid)
    os.setresuid(found.pw_uid, found.pw_uid, found.pw_uid)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _files(connections: int) -> int:
    """How many connections there are descriptors for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(connections, (hard - _FEW_FILES) // 2) if hard != resource.RLIM_INFINITY else connections


def main() -> None:
    target, allow, connections, user = sys.argv[1:5]
    listener, box, counts = map(int, sys.argv[5:8])
    os.chdir("/")
    mapped = mmap.mmap(counts, COUNTS.size)
    try:
        _become(user)
    except (OSError, KeyError) as error:
        sys.exit(f"cannot become {user}: {error}")
    door = Door(socket.socket(fileno=listener), box, mapped, allow.split(","), _files(int(connections)))
    os.write(1, b"ready\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    select.select([0, box], [], [])
    port = os.read(0, 16) if select.select([0], [], [], 0)[0] else b""
    if port:
        os.close(0)
        door.run((target, int(port)))


if __name__ == "__main__":
    main()
