"""Worker in ContextPilot's environment, without ragorder: JSON lines in and out. File descriptor 1 is closed to
ContextPilot's own output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def answer(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    try:
        # mypy sees the environment in which this file does not run.
        from contextpilot.server.live_index import ContextPilot  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:
        answer(error=_describe(error))
        return
    answer(ready=True)
    indexes: dict[int, Any] = {}
    for line in sys.stdin:
        call = json.loads(line)
        run = call["run"]
        for ended in call["ended"]:
            indexes.pop(ended, None)
        start = time.thread_time_ns()
        try:
            with contextlib.redirect_stdout(None):
                if run not in indexes:
                    indexes[run] = ContextPilot(use_gpu=False)
                orders, indices = indexes[run].reorder(call["requests"])
        except Exception as error:
            answer(error=_describe(error), ns=time.thread_time_ns() - start)
        else:
            ns = time.thread_time_ns() - start
            answer(orders=[list(map(int, order)) for order in orders], indices=list(map(int, indices)), ns=ns)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


if __name__ == "__main__":
    main()
