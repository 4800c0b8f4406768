"""One proxy of real engines: what they have cached together, and what is lost with one that is killed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from support.sent_requests import get, post
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually

SYSTEM = {"role": "system", "content": "Answer from the documents."}
SUBJECTS, OF_SUBJECT = 8, 5


@dataclass
class Asked:
    """Questions about documents with these names and texts, five on each subject."""

    model: str
    texts: dict[str, str]

    def drawn(self, rng: random.Random) -> list[str]:
        """Three of the documents on one subject."""
        first = OF_SUBJECT * rng.randrange(SUBJECTS)
        return rng.sample(list(self.texts)[first : first + OF_SUBJECT], 3)

    def body(self, names: Sequence[str], query: str, tokens: int = 1) -> dict[str, Any]:
        tag = {"documents": [{"id": name, "text": self.texts[name]} for name in names], "query": query}
        options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self.model, "messages": [SYSTEM], "ragorder": tag, **options}

    def cached_tokens(self, url: str) -> int:
        """Of 80 requests, as the engines report them."""
        rng, count = random.Random(0), 0
        for number in range(80):
            answer = post(url, self.body(self.drawn(rng), str(number)))
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            count += details.get("cached_tokens") or 0
        return count

    def check_that_a_killed_engine_loses_only_begun_answers(
        self, url: str, kill: Callable[[], None], *, answer_tokens: int, timeout_s: float
    ) -> list[StreamedAnswer]:
        """Of two engines the first one is killed. Each computes two requests at a time: the others wait for their first
        token. No answer of so many tokens ends before. Return those that were lost."""
        rng = random.Random(1)
        long, short = [[StreamedAnswer() for _ in range(count)] for count in (4, 12)]

        def in_flight() -> list[int]:
            return [each["in_flight"] for each in get(f"{url}/ragorder/replicas").json()["replicas"]]

        with ThreadPoolExecutor(24) as pool:

            def send(kind: str, tokens: int, answers: Sequence[StreamedAnswer]) -> list[Future[StreamedAnswer]]:
                bodies = [self.body(self.drawn(rng), f"{kind} {number}", tokens) for number in range(len(answers))]
                return [
                    pool.submit(stream, url, each, into, timeout_s) for each, into in zip(bodies, answers, strict=True)
                ]

            sent = send("long", answer_tokens, long)
            began = eventually(lambda: all(each.began.is_set() for each in long) or any(map(Future.done, sent)), 120)
            assert began and not any(map(Future.done, sent)), long
            send("short", 4, short)
            whole = [pool.submit(post, url, self.body(self.drawn(rng), f"whole {number}", 4)) for number in range(4)]
            assert eventually(lambda: sum(in_flight()) == 20), [*long, *short]
            # More than it computes.
            assert in_flight()[0] > 2
            kill()
        lost, kept = [[each for each in long if each.replica == replica] for replica in "01"]
        assert lost and kept
        for each in lost:
            # What had come is not sent again, and does not look whole.
            assert each.text and each.broke and not each.done, lost
            assert each.error is None or each.error["code"] == "upstream_unavailable"
        assert [(each.done, each.error, each.broke) for each in kept] == [(True, None, False)] * len(kept)
        assert [(each.status, each.replica, each.done, each.error) for each in short] == [(200, "1", True, None)] * 12
        assert [answer.result().status_code for answer in whole] == [200] * 4
        assert in_flight() == [0, 0]
        return lost
