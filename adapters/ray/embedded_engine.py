"""The embedded engine as the engine of a replica."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

if TYPE_CHECKING:
    from ragorder.kernels.engine_settings import EngineSettings
    from ragorder.settings import Settings

__all__ = ["EmbeddedEngine"]

# Never resolved; nothing listens there.
_NOWHERE = "http://embedded"


class EmbeddedEngine:
    """Maker of an engine with the model in `folder` and an orderer of its tiers, in each replica.

        app = make_application(EmbeddedEngine("/models/llama", EngineSettings(device_tokens=65_536)))

    `orderer` has the settings of its orderer (default: the engine's sizes), `options` are the proxy's. In the replica
    it raises ImportError without torch, and the errors of `TieredEngine.load`.
    """

    def __init__(
        self,
        folder: str,
        settings: EngineSettings | None = None,
        *,
        orderer: Settings | None = None,
        max_unfinished: int = 1024,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.orderer = orderer
        self.max_unfinished = max_unfinished
        self.options = options

    def __call__(self) -> ASGIApp:
        # A driver that only deploys needs no torch.
        from ragorder.adapters.embedded import AppTransport, EngineWorker, hosted, make_engine_app, with_sizes
        from ragorder.adapters.proxy import make_app
        from ragorder.kernels.engine import TieredEngine
        from ragorder.orderer import Orderer

        worker = EngineWorker(TieredEngine.load(self.folder, self.settings), max_unfinished=self.max_unfinished)
        engine = make_engine_app(worker)
        proxy = make_app(
            Orderer(with_sizes(self.orderer or Orderer().settings, worker)),
            upstream=_NOWHERE,
            tokenizer=deepcopy(worker.engine.tokenizer),
            send_facts=True,
            make_transport=lambda: AppTransport(engine),
            **self.options,
        )
        return hosted(proxy, worker)
