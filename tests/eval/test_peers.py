"""Peers: other projects' ordering in a process and an environment of its own, which can break nothing of ours."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.benched import run_bench

from ragorder import Document
from ragorder.eval.peers import PEERS, Peer, PeerError, PeerPolicy, prepare_peer
from ragorder.eval.peers import environment as environments
from ragorder.eval.peers.policy import Worker
from ragorder.eval.running.specs import Bench

pytestmark = pytest.mark.merge

WORKER = """
import json, os, sys, time
print_here = os.dup(1)
def answer(**fields):
    os.write(print_here, (json.dumps(fields) + "\\n").encode())
answer(ready=True)
seen = {}
for line in sys.stdin:
    call = json.loads(line)
    requests = call["requests"]
    SCRIPT
"""
REVERSES = "answer(orders=[r[::-1] for r in requests], indices=list(range(len(requests))), ns=1000)"

Make = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A worker, in this Python, that does with each call what a line of code says."""
    started: list[Worker] = []

    def start(does: str, timeout_s: float = 20) -> Worker:
        script = tmp_path / f"worker-{len(started)}.py"
        script.write_text(WORKER.replace("SCRIPT", textwrap.indent(does, "    ").strip()))
        started.append(Worker(Path(sys.executable), script, timeout_s=timeout_s))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def documents(*names: str) -> list[Document]:
    return [Document(name, f"text of {name}") for name in names]


class TestAPeersPolicy:
    def test_orders_as_the_peer_says_and_takes_its_own_time(self, make: Make) -> None:
        policy = PeerPolicy(make(REVERSES))
        given = documents("a", "b", "c")
        ordering = policy.order(given)
        assert ordering.documents == given[::-1]
        assert list(ordering.permutation) == [2, 1, 0]
        assert (policy.fallbacks, policy.clock_ns()) == (0, 1_000)

    def test_a_document_that_is_given_twice_comes_back_twice(self, make: Make) -> None:
        given = documents("a", "b", "a")
        ordering = PeerPolicy(make("answer(orders=[sorted(requests[0])], indices=[0], ns=1)")).order(given)
        assert sorted(ordering.permutation) == [0, 1, 2]
        assert [document.id for document in ordering.documents] == ["a", "a", "b"]

    @pytest.mark.parametrize(
        "answers",
        [
            "answer(orders=[requests[0][:-1]], indices=[0], ns=1)",
            "answer(orders=[requests[0] + [99]], indices=[0], ns=1)",
            "answer(orders=[[99] * len(requests[0])], indices=[0], ns=1)",
            "answer(orders=[requests[0]], indices=[5], ns=1)",
            "answer(orders=[], indices=[], ns=1)",
            'answer(error="KeyError: 7", ns=1)',
        ],
    )
    def test_an_answer_with_other_documents_leaves_retrieval_order_and_is_counted(
        self, make: Make, answers: str
    ) -> None:
        policy, given = PeerPolicy(make(answers)), documents("a", "b", "c")
        assert policy.order(given).documents == given
        assert policy.fallbacks == 1
        assert policy.first_error

    def test_a_batch_is_served_in_the_peers_order(self, make: Make) -> None:
        policy = PeerPolicy(make("answer(orders=requests[::-1], indices=[2, 1, 0], ns=1)"))
        requests = [documents("a"), documents("b", "c"), documents("d")]
        orderings = list(policy.order_batch(requests))
        assert [ordering.index for ordering in orderings] == [2, 1, 0]
        assert [ordering.documents for ordering in orderings] == requests[::-1]

    def test_the_peer_sees_numbers_and_no_word_and_no_key_of_ours(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        worker = make("answer(error=line.strip() + repr(dict(os.environ)), ns=1)")
        policy = PeerPolicy(worker)
        policy.order(documents("alpha", "beta"))
        assert policy.first_error is not None and "[[0, 1]]" in policy.first_error
        assert [word for word in ("alpha", "beta", "secret") if word in policy.first_error] == []

    def test_each_run_has_an_index_of_its_own_which_ends_with_it(self, make: Make) -> None:
        worker = make("answer(error=f\"{call['run']} {call['ended']}\", ns=1)")
        one, other = PeerPolicy(worker), PeerPolicy(worker)
        for policy in (one, other):
            policy.order(documents("a"))
        assert (one.first_error, other.first_error) == ("1 []", "2 []")
        del one, policy
        gc.collect()
        third = PeerPolicy(worker)
        third.order(documents("a"))
        assert third.first_error == "3 [1]"


class TestAPeersProcess:
    @pytest.mark.parametrize(
        "does",
        ["os._exit(3)", "time.sleep(600)", 'os.write(print_here, b"GPU not available, using CPU\\n")'],
        ids=["dies", "hangs", "answers nonsense"],
    )
    def test_that_dies_hangs_or_answers_nonsense_is_ended_for_good(self, make: Make, does: str) -> None:
        worker = make(does, timeout_s=0.5 if "sleep" in does else 20)
        policy = PeerPolicy(worker)
        for _ in range(2):
            with pytest.raises(PeerError, match="process ended, or gave no answer within"):
                policy.order(documents("a"))
            assert not worker.alive

    def test_that_cannot_start_gives_the_reason(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match="does not start"):
            Worker(tmp_path / "no-python", tmp_path / "no-script.py")
        script = tmp_path / "broken.py"
        script.write_text("""print('{"error": "ImportError: no module named contextpilot"}')""")
        with pytest.raises(PeerError, match="no module named contextpilot"):
            Worker(Path(sys.executable), script)

    def test_without_the_package_says_so(self, tmp_path: Path) -> None:
        """The real worker, in an environment without ContextPilot."""
        script = Path(environments.__file__).with_name("contextpilot_worker.py")
        with pytest.raises(PeerError, match="ModuleNotFoundError: No module named 'contextpilot'"):
            Worker(Path(sys.executable), script)


class TestAnEnvironment:
    @pytest.mark.slow
    def test_that_cannot_be_made_gives_the_reason_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(PEERS, "contextpilot", Peer("contextpilot", "contextpilot==999.0", ()))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(PeerError, match=r"contextpilot==999\.0 cannot be installed: No matching distribution"):
            prepare_peer("contextpilot", folder=tmp_path)
        assert not list(tmp_path.iterdir())

    def test_that_takes_too_long_to_make_is_given_up(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match="no end after"):
            prepare_peer("contextpilot", folder=tmp_path, timeout_s=0.01)
        assert not list(tmp_path.iterdir())

    def test_in_a_file_instead_of_a_folder_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PeerError, match="cannot be installed"):
            prepare_peer("contextpilot", folder=tmp_path / "file")

    def test_that_is_there_is_reused(self, tmp_path: Path) -> None:
        python = tmp_path / PEERS["contextpilot"].folder_name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        assert prepare_peer("contextpilot", folder=tmp_path) == python


@pytest.fixture(scope="module")
def installed() -> None:
    """ContextPilot from the package index, or not at all."""
    if os.environ.get("PIP_NO_INDEX"):
        pytest.skip("no package index")
    try:
        prepare_peer("contextpilot")
    except PeerError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
class TestContextPilot:
    def test_saves_what_the_notes_say(self) -> None:
        """notes/ordering.md, mean of two seeds, which differ from run to run by under a point."""
        shares = {}
        for workload in ("paper-shuf", "geo"):
            results = run_bench(Bench(workloads=(workload,), policies=("contextpilot",), seeds=(0, 1)))
            cached, prompts = (
                sum(getattr(each, name) for each in results) for name in ("cached_tokens", "prompt_tokens")
            )
            shares[workload] = 100 * cached / prompts
        assert shares == {"paper-shuf": pytest.approx(34.3, abs=0.7), "geo": pytest.approx(25.0, abs=0.7)}

    def test_plans_batches_and_loses_no_document(self) -> None:
        one, batch = (
            run_bench(Bench(workloads=("paper-shuf",), policies=("contextpilot",), limit=120, batch=batch))[0]
            for batch in (False, True)
        )
        assert (batch.requests, batch.prompt_tokens) == (120, one.prompt_tokens)
        assert batch.cached_tokens > one.cached_tokens

    def test_prints_nothing_of_its_own(self, capfd: pytest.CaptureFixture[str]) -> None:
        run_bench(Bench(workloads=("paper-shuf",), policies=("contextpilot",), limit=20))
        assert capfd.readouterr() == ("", "")
