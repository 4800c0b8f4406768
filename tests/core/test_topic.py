"""Topics: the same for the same documents, in any order and in any process, and none of the documents' own words."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Document, Orderer
from ragorder.adapters.observing import ObservedOrderer
from ragorder.topic import SECRET_VARIABLE, Topics, checked_header

SECRET = "a secret of these tests"  # noqa: S105


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def warmed(topics: Topics, requests: int = 2000, seed: int = 0) -> Topics:
    """After requests in which document n is about twice as popular as document n + 1."""
    rng = random.Random(seed)
    for _ in range(requests):
        topics.of({f"d{min(9, int(rng.expovariate(0.7)))}" for _ in range(3)})
    return topics


class TestATopic:
    @given(st.lists(st.text(max_size=4), min_size=1, max_size=8, unique=True), st.randoms())
    def test_does_not_depend_on_the_order(self, keys: list[str], rng: random.Random) -> None:
        shuffled = keys[:]
        rng.shuffle(shuffled)
        assert Topics(SECRET).of(keys) == Topics(SECRET).of(shuffled)

    def test_is_that_of_the_most_popular_document(self) -> None:
        topics = Topics(SECRET, share=1.0)
        for _ in range(20):
            topics.of(["popular"])
        alone = topics.of(["popular"])
        assert topics.of(["rare", "popular"]) == topics.of(["popular", "other"]) == alone
        assert topics.of(["rare", "other"]) != alone

    def test_does_not_change_with_popularity_of_the_same_order_of_magnitude(self) -> None:
        """Otherwise requests on one subject would leave their cache whenever two counts cross."""
        topics, rng = Topics(SECRET, share=1.0), random.Random(1)
        pairs = []
        for _ in range(3000):
            # Any four of ten equally popular documents.
            keys = rng.sample(range(10), 4)
            pairs.append((frozenset(keys), topics.of(map(str, keys))))
        later: dict[frozenset[int], set[Any]] = {}
        for keys, topic in pairs[500:]:
            later.setdefault(frozenset(keys), set()).add(topic)
        assert sum(len(found) == 1 for found in later.values()) >= 0.7 * len(later)

    def test_goes_on_to_the_next_document_while_it_has_too_large_a_share(self) -> None:
        """One document is in every request: alone it would send all of them to one replica."""
        rng = random.Random(2)
        requests = [["everywhere", f"second {rng.randrange(40)}", f"third {rng.randrange(400)}"] for _ in range(4000)]
        whole, split = Topics(SECRET, share=1.0), Topics(SECRET, share=0.05)
        found = [(whole.of(keys), split.of(keys)) for keys in requests][1000:]
        assert len({alone for alone, _ in found}) == 1
        shares = Counter(topic for _, topic in found)
        assert max(shares.values()) <= 0.07 * 3000
        # Of the 40 second documents, not of the 400 third ones.
        assert sum(count for _, count in shares.most_common(40)) >= 0.9 * 3000

    def test_of_no_documents_is_none_and_white_space_is_no_part_of_a_secret(self) -> None:
        assert Topics(SECRET).of([]) is Topics(SECRET).of([], scope="acme") is None
        assert Topics(f" {SECRET}\n").of(["a"]) == Topics(SECRET).of(["a"])

    def test_counts_a_repeated_document_once(self) -> None:
        topics = Topics(SECRET, share=1.0)
        for _ in range(8):
            topics.of(["often"])
        topics.of(["twice"] * 50)
        assert topics.of(["often", "twice"]) == topics.of(["often"])


class TestProcesses:
    def test_that_see_samples_of_the_same_traffic_agree_on_most_requests(self) -> None:
        ours, theirs = warmed(Topics(SECRET), seed=1), warmed(Topics(SECRET), seed=2)
        rng = random.Random(3)
        requests = [{f"d{min(9, int(rng.expovariate(0.7)))}" for _ in range(3)} for _ in range(500)]
        assert sum(ours.of(keys) == theirs.of(keys) for keys in requests) >= 450

    def test_take_the_secret_of_the_environment(self, monkeypatch: pytest.MonkeyPatch, python: Any) -> None:
        script = "from ragorder import Document, Orderer\n"
        script += "print(Orderer().topic([Document('a', 'x'), Document('b', 'y')], scope='acme'))"
        done = [python("-c", script, PYTHONHASHSEED=str(seed), **{SECRET_VARIABLE: SECRET}) for seed in (1, 2)]
        monkeypatch.setenv(SECRET_VARIABLE, SECRET)
        here = Orderer().topic([Document("b", "y"), Document("a", "x")], scope="acme")
        assert [each.stdout.strip() for each in done] == [here, here], done[0].stderr

    def test_without_a_secret_do_not_agree(self, python: Any) -> None:
        script = "from ragorder import Document, Orderer; print(Orderer().topic([Document('a', 'x')]))"
        found = {python("-c", script).stdout for _ in range(2)}
        assert len(found) == 2
        assert not Topics().shared and Topics(SECRET).shared


class TestSecrecy:
    def test_depends_on_scope_and_secret(self) -> None:
        found = {
            Topics(secret).of(["a"], scope) for secret in (SECRET, "another") for scope in (None, "x", "y", b"x", 1)
        }
        assert len(found) == 10
        assert Topics(SECRET).of(["b"], scope="a") != Topics(SECRET).of(["ab"], scope=""), "parts cannot be exchanged"
        assert all(topic is not None and len(topic) == 32 and int(topic, 16) >= 0 for topic in found)

    def test_popularity_in_one_scope_says_nothing_in_another(self) -> None:
        """A tenant must not learn from its topics what another one asks for."""
        quiet, busy = Topics(SECRET, share=1.0), Topics(SECRET, share=1.0)
        for _ in range(100):
            busy.of(["b"], scope="other")
        for keys in (["a", "b"], ["b", "c"], ["a", "b", "c"]):
            assert quiet.of(keys, scope="mine") == busy.of(keys, scope="mine")

    @pytest.mark.parametrize("secret", ["", " \n"])
    def test_an_empty_secret_is_refused(self, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=SECRET_VARIABLE):
            Topics(secret)
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        with pytest.raises(ValueError, match=SECRET_VARIABLE):
            Topics()

    @pytest.mark.parametrize("share", [0, -1, 1.5])
    def test_an_impossible_share_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match="share"):
            Topics(SECRET, share=share)


class TestOfAnOrderer:
    DOCUMENTS = (Document("a", "one"), Document("b", "two"), Document("c", "three"))

    def test_is_that_of_the_keys_and_orders_nothing(self) -> None:
        orderer = Orderer(topics=Topics(SECRET), strict=True)
        expected = Topics(SECRET).of([document.key for document in self.DOCUMENTS], "acme")
        assert orderer.topic(self.DOCUMENTS, scope="acme") == expected
        assert orderer.tree_size == 0
        assert orderer.order(self.DOCUMENTS, scope="acme").cached_tokens == 0
        others = Orderer(key=str.upper, tokens=len, topics=Topics(SECRET), strict=True)
        assert others.topic(["a", "b"]) == Topics(SECRET).of(["A", "B"])

    def test_an_error_inside_is_counted_and_gives_none(self) -> None:
        class Unprintable:
            def __repr__(self) -> str:
                raise RuntimeError

        orderer = Orderer(key=lambda document: Unprintable(), tokens=lambda document: 1)
        with pytest.warns(UserWarning):
            assert orderer.topic(["a"]) is None
        assert orderer.fallbacks == 1
        with pytest.raises(RuntimeError):
            Orderer(key=lambda document: Unprintable(), tokens=lambda document: 1, strict=True).topic(["a"])

    def test_copies_and_wrappers_have_the_same(self) -> None:
        orderer = Orderer(topics=Topics(SECRET), strict=True)
        others = [copy.copy(orderer), pickle.loads(pickle.dumps(orderer)), ObservedOrderer(orderer)]  # noqa: S301
        found = {other.topic(self.DOCUMENTS) for other in others}
        assert found == {orderer.topic(self.DOCUMENTS)}


class TestTheHeader:
    @pytest.mark.parametrize("name", ["x-session-id", "X-SMG-Routing-Key", "topic"])
    def test_may_have_any_name(self, name: str) -> None:
        assert checked_header(name) == name

    @pytest.mark.parametrize("name", ["", "x session", "x:y", "ä", "Authorization", "host", "content-length", "a\nb"])
    def test_but_not_one_that_cannot_be(self, name: str) -> None:
        with pytest.raises(ValueError, match="x-session-id"):
            checked_header(name)
