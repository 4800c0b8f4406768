"""Work for an event loop on its own thread ends, also beside its close."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
from support.waiting import eventually

from ragorder.pipelining.loop_thread import LoopThread


def test_work_that_comes_while_it_is_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, outcomes = LoopThread("the loop"), list[Any]()
    waits, comes, closing, submitted = (threading.Event() for _ in range(4))
    submit = asyncio.run_coroutine_threadsafe

    def submit_late(work: Any, loop: Any) -> Any:
        if threading.current_thread() is not caller:
            return submit(work, loop)
        comes.set()
        # Long enough for a close that does not wait.
        closing.wait(0.5)
        try:
            return submit(work, loop)
        finally:
            submitted.set()

    async def slow_to_end() -> None:
        try:
            waits.set()
            await asyncio.sleep(3600)
        finally:
            closing.set()
            await asyncio.to_thread(submitted.wait, 60)

    async def work() -> str:
        await asyncio.sleep(3600)
        return "done"

    def call(coroutine: Any) -> None:
        try:
            outcomes.append(thread.run(coroutine))
        except (CancelledError, RuntimeError) as error:
            outcomes.append(error)

    threading.Thread(target=call, args=(slow_to_end(),), daemon=True).start()
    assert waits.wait(60)
    caller = threading.Thread(target=call, args=(work(),), daemon=True)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_late)
    caller.start()
    assert comes.wait(60)
    thread.close()
    assert eventually(lambda: len(outcomes) == 2) and "done" not in outcomes
    with pytest.raises(RuntimeError, match="the loop is closed"):
        thread.run(work())
