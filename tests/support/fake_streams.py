"""A GPU's streams where there is none: what they are told, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def fake_streams(patch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, ...]]:
    """Streams with these names, as they are made, beside the one that computes. Return what they are told."""
    told: list[tuple[str, ...]] = []
    unused = iter(names)

    class Stream:
        def __init__(self, device: Any = None, name: str | None = None) -> None:
            self.name = name or next(unused)

        def wait_stream(self, other: Stream) -> None:
            told.append((self.name, "waits for", other.name))

        def wait_event(self, event: Event) -> None:
            told.append((self.name, "waits for", event.name))

        def synchronize(self) -> None:
            told.append(("host", "waits for", self.name))

    class Event:
        name = ""

        def __init__(self, *, blocking: bool = False) -> None:
            self.blocking = blocking

        def record(self, stream: Stream) -> None:
            self.name = f"event of {stream.name}"
            told.append((stream.name, "records"))

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            assert self.blocking, "the host would spin"
            told.append(("host", "waits for", self.name))

    @contextmanager
    def stream(current: Stream) -> Iterator[None]:
        told.append(("begin", current.name))
        yield
        told.append(("end", current.name))

    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "stream", stream)
    patch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "compute"))
    patch.setattr(torch.Tensor, "record_stream", lambda _, stream: told.append(("buffer", "is used by", stream.name)))
    return told
