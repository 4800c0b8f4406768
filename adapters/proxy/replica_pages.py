"""The replicas of a fleet: their state, and draining."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.fleet import Fleet

__all__ = ["replica_routes"]

_PATH = "/ragorder/replicas"


def replica_routes(fleet: Fleet) -> list[Route]:
    """`GET /ragorder/replicas`; `POST /ragorder/replicas/N/drain` and `…/resume`, which answer the same."""

    async def show(_: Request) -> JSONResponse:
        return JSONResponse({"replicas": fleet.as_json()}, headers={"Cache-Control": "no-store"})

    async def change(request: Request) -> JSONResponse:
        number = int(request.path_params["number"])
        if number >= len(fleet.replicas):
            message = f"There is no replica {number}: {_PATH} lists them."
            raise HTTPError(404, message, code="no_such_replica")
        fleet.replicas[number].draining = request.url.path.endswith("/drain")
        return await show(request)

    paths = [f"{_PATH}/{{number:int}}/{verb}" for verb in ("drain", "resume")]
    return [Route(_PATH, show), *(Route(path, change, methods=["POST"]) for path in paths)]
