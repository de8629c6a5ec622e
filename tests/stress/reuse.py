"""Sockets closed and opened so fast that every fd number is another's a moment later.

An event of a socket that was closed must never be told to whoever got its number,
not even where a dup keeps the old registration alive in the kernel's set.
"""

import os
import random
import socket
import threading
import time

from disconnect_watch import CancelToken, Connection, Watcher
from tests.stress.tally import Tally

__all__ = ["storm"]

_NUM_THREADS = 2
_PATIENCE = 40.0  # seconds
_MAX_SPIN_NS = 60_000  # about twice what it takes to wake the watcher


def storm(num_trials: int, seed: int) -> Tally:
    """Try so many sockets in a few threads on one watcher."""
    tally = Tally()
    lock = threading.Lock()
    per_thread = num_trials // _NUM_THREADS

    def work(number: int, watcher: Watcher) -> None:
        mine = _storm(watcher, random.Random(seed + number), per_thread)
        with lock:
            tally.trials += mine.trials
            tally.left += mine.left
            tally.lost += mine.lost
            tally.false += mine.false

    with Watcher() as watcher:
        threads = [
            threading.Thread(target=work, args=(number, watcher)) for number in range(_NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return tally


def _spin(rng: random.Random) -> None:
    end_ns = time.perf_counter_ns() + rng.randrange(_MAX_SPIN_NS)
    while time.perf_counter_ns() < end_ns:
        pass


def _storm(watcher: Watcher, rng: random.Random, num_trials: int) -> Tally:
    tally = Tally()
    stale: list[Connection] = []
    dups: list[int] = []
    was_racing = False
    for _ in range(num_trials):
        server, client = socket.socketpair()
        token = CancelToken()
        conn = watcher.attach(server)
        conn.arm(token)
        for other in stale:  # the fd it was of is ours by now, or another thread's
            other.detach()
        stale.clear()
        way = rng.choice(("told", "told", "race", "stay", "undetached", "dup"))
        if was_racing:
            _spin(rng)  # the event of the last one may be on its way to the thread
        was_racing = way == "race"
        if way == "told":
            was_told_early = token.cancelled
            client.close()
            was_told = token.wait(_PATIENCE)
            tally.count(has_left=not was_told_early, was_told=was_told)
        else:
            tally.count(has_left=False, was_told=token.cancelled)
        if way == "race":
            client.close()  # and its event may find the socket gone
            _spin(rng)
        if way == "dup":
            dups.append(os.dup(server.fileno()))
        if way in ("undetached", "dup"):
            stale.append(conn)
        else:
            conn.detach()
        server.close()
        client.close()
        if dups and rng.random() < 0.5:
            os.close(dups.pop())
    for other in stale:
        other.detach()
    for fd in dups:
        os.close(fd)
    return tally
