"""Whoever waits for a change is woken by it: in this loop, in another one, and by one that came before it waited."""

from __future__ import annotations

import asyncio
import threading

from app.snapshots.changes import Changes


async def test_a_change_after_the_count_was_read_is_not_missed() -> None:
    changes = Changes()
    seen = changes.count
    changes.notify()
    assert await asyncio.wait_for(changes.wait(seen, 60), 10)
    assert changes.count == seen + 1


async def test_silence_ends_and_what_is_seen_already_is_no_change() -> None:
    changes = Changes()
    changes.notify()
    assert not await changes.wait(changes.count, 0.001)
    changes.notify()  # nobody waits any more: the one who gave up is not woken


async def test_all_who_wait_are_woken_at_once() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait(0, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    changes.notify()
    changes.notify()
    assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10) == [True, True]


async def test_a_change_in_another_thread_wakes_this_loop() -> None:
    changes = Changes()
    waiting = asyncio.create_task(changes.wait(0, 60))
    await asyncio.sleep(0)
    thread = threading.Thread(target=changes.notify)
    thread.start()
    assert await asyncio.wait_for(waiting, 10)
    thread.join()


async def test_a_loop_that_is_closed_does_not_keep_others_from_being_woken() -> None:
    changes = Changes()

    def leave() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(changes.wait(0, 60))
        loop.run_until_complete(asyncio.sleep(0))
        left.append((loop, task))
        loop.close()

    left: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[bool]]] = []
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    waiting = asyncio.create_task(changes.wait(0, 60))
    await asyncio.sleep(0)
    changes.notify()
    assert await asyncio.wait_for(waiting, 10)
