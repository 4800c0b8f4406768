"""One request on one replica after another."""

from __future__ import annotations

from ragorder.adapters.proxy.fleet import Fleet
from ragorder.adapters.proxy.replica import Replica
from ragorder.adapters.proxy.rests import RefusedError, rest_asked
from ragorder.adapters.proxy.upstream import UpstreamError

__all__ = ["Tries"]

_FAILED = (500, 502, 503, 504)


class Tries:
    """The `replicas` that a request was sent to, and what their answers say about them.

    `repeatable`: it may be sent to another one after a server has received it. `counted`: a failure may be followed by
    a rest. `only` this one can answer.
    """

    def __init__(self, fleet: Fleet, *, repeatable: bool, counted: bool, only: Replica | None = None) -> None:
        self.replicas: list[Replica] = []
        self.only = only
        self._fleet = fleet
        self._repeatable = repeatable and only is None
        self._counted = counted
        self._has_failed = False

    def begin(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self._has_failed = False

    @property
    def refusable(self) -> bool:
        """Whether another replica may answer in the place of the last one."""
        return self._repeatable and self._fleet.has_other(self.replicas)

    def answered(self, status: int, retry_after: str) -> None:
        """The head of an answer has come. Raises RefusedError if this replica is to rest and another one may answer."""
        replica = self.replicas[-1]
        rest_s = rest_asked(status, retry_after)
        if rest_s is not None:
            self._fleet.rest(replica, rest_s)
            if self._repeatable and self._fleet.has_rested(self.replicas):
                raise RefusedError(status, "The upstream server does not take requests.", code="upstream_unavailable")
        elif self._counted and status in _FAILED:
            self._has_failed = True
            replica.rests.failed()
        elif self._counted:
            replica.rests.succeeded()

    def failed(self) -> None:
        """The last replica has, before the end of its answer."""
        replica = self.replicas[-1]
        self._fleet.suspect(replica)
        if self._counted and not self._has_failed:
            replica.rests.failed()
        self._has_failed = True

    def gives_up(self, error: UpstreamError, *, begun: bool) -> bool:
        """Whether the last replica's error is the request's."""
        if not isinstance(error, RefusedError):
            self.failed()
        if begun or self.only is not None or not (self._repeatable or not error.connected):
            return True
        return not self._fleet.has_other(self.replicas)
