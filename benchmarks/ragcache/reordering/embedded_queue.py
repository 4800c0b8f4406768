"""The embedded engine's own queue on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from ragorder import Lengths
from ragorder.benchmarks.kernels.embedded.prompts import RandomPrompts
from ragorder.benchmarks.ragcache.reordering.queueing import Discipline, QueueOutcome, VirtualQueues
from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.running.policies import make_orderer
from ragorder.ordering import Ordering

__all__ = ["EmbeddedQueues"]


@dataclass(frozen=True, slots=True)
class EmbeddedQueues(VirtualQueues):
    """Documents are ordered on arrival, as behind the proxy; then requests wait in the engine. Its steps are computed,
    and take the time of their tokens at the rate of `times`; loads from host memory take none."""

    name = "torch"
    model: TorchModel = field(kw_only=True)

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        prompts, outcome = RandomPrompts(self.model.vocabulary), QueueOutcome(len(at_s))
        served = TorchEngine(
            self.model,
            capacity_tokens=self.capacity_tokens,
            output_tokens=self.output_tokens,
            max_requests=self.max_in_flight,
            schedule_window=discipline.window,
        )
        lengths = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens}
        orderer = make_orderer("free", engine=served, **lengths)
        waiting: dict[int, tuple[int, Ordering[Document]]] = {}
        order: list[int] = []
        clock, arrived, computed = 0.0, 0, 0
        with closing(served):
            engine = served.engine
            while arrived < len(at_s) or engine.has_unfinished:
                if not engine.has_unfinished:
                    clock = max(clock, at_s[arrived])
                while arrived < len(at_s) and at_s[arrived] <= clock:
                    request = trace.requests[arrived]
                    ordering = orderer.order(request.documents, lengths=Lengths(suffix=prompts.suffix_tokens(request)))
                    token_ids = prompts.token_ids(arrived, request, ordering.documents)
                    waiting[engine.add(served.request(token_ids))] = arrived, ordering
                    arrived += 1
                updates = engine.step()
                total = engine.stats().computed_tokens
                clock += (total - computed) / self.times.prefill_tokens_per_s
                computed = total
                for update in updates:
                    number, ordering = waiting[update.request_id]
                    if number not in order:
                        order.append(number)
                        outcome.ttft_s[number] = clock - at_s[number]
                    if update.completion is not None:
                        completion = served.completion(update.completion)
                        outcome.served(number, completion, outcome.ttft_s[number])
                        ordering.confirm(completion.cached_tokens)
                        del waiting[update.request_id]
        outcome.total_s = clock
        outcome.largest_overtaking = _largest_overtaking(order)
        return outcome


def _largest_overtaking(order: Sequence[int]) -> int:
    return max((sum(other > mine for other in order[:place]) for place, mine in enumerate(order)), default=0)
