"""Settings: keyword arguments first, then the environment, then the defaults; what is wrong is named."""

from __future__ import annotations

import os
import re
import typing
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from ragorder import Orderer, Settings
from ragorder.settings import OrdererOptions
from ragorder.trie.registry import Registry
from ragorder.trie.search import SearchName, searches
from ragorder.trie.tail import TailName, tails


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("RAGORDER_"):
            monkeypatch.delenv(name)


def problem(**options: Any) -> str:
    """What is said about wrong settings."""
    with pytest.raises(ValidationError) as caught:
        Settings(**options)
    return str(caught.value)


def test_every_field_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_none_in_the_environment_is_no_limit_and_a_keyword_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGORDER_CAPACITY_TOKENS", "none")
    assert Settings().capacity_tokens is None
    assert Settings(capacity_tokens=64).capacity_tokens == 64


class TestValidation:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [("capacity", "capacity_tokens"), ("blocksize", "block_size"), ("keep_firsts", "keep_first"), ("zzz", None)],
    )
    @pytest.mark.parametrize(
        "give",
        [
            Settings,
            Orderer,
            Orderer().clone,
            lambda **options: Orderer.for_vllm("http://127.0.0.1:9", **options),
            lambda **options: Orderer.for_cloud("anthropic", model="claude-opus-5", **options),
        ],
        ids=["Settings", "Orderer", "clone", "for_vllm", "for_cloud"],
    )
    def test_the_name_that_was_meant_is_suggested(self, give: Any, name: str, meant: str | None) -> None:
        with pytest.raises(ValueError, match=f"there is no setting '{name}'") as caught:
            give(**{name: 100})
        assert (f"did you mean '{meant}'?" in str(caught.value)) == (meant is not None)

    def test_a_capacity_that_is_assumed_is_said_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "capacity_tokens=262144 (assumed: give the engine's)" in repr(Orderer())
        assert "assumed" not in repr(Orderer(capacity_tokens=262_144))
        monkeypatch.setenv("RAGORDER_CAPACITY_TOKENS", "4096")
        assert "assumed" not in repr(Orderer())

    @pytest.mark.parametrize(
        ("name", "wrong", "meant", "choices"),
        [
            ("search", "bset", "best", get_args(get_args(SearchName)[0])),
            ("moves", "fere", "free", get_args(get_args(TailName)[0])),
            ("residency", "bset", "", get_args(Settings.model_fields["residency"].annotation)),
        ],
    )
    def test_an_unknown_policy_names_the_field_and_the_choices(
        self, name: str, wrong: str, meant: str, choices: tuple[str, ...]
    ) -> None:
        said = problem(**{name: wrong})
        assert name in said and (f"did you mean '{meant}'?" in said or not meant)
        assert all(repr(choice) in said for choice in choices)

    @pytest.mark.parametrize(("registry", "names"), [(searches, SearchName), (tails, TailName)])
    def test_type_checkers_see_the_registered_names(self, registry: Registry[Any], names: Any) -> None:
        # The evaluation registers baselines of its own.
        ours = [name for name in registry.names if registry[name].__module__.startswith("ragorder.trie.")]
        assert list(get_args(get_args(names)[0])) == ours

    def test_a_misspelt_policy_of_the_tiers_is_refused_by_the_orderer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = r"^tier_policy: .*'lru', 'pgdsf', got 'pgsdf': did you mean 'pgdsf'"
        for tiers in ({}, {"capacity_tokens": 1024, "host_tokens": 4096}):
            with pytest.raises(ValueError, match=said):
                Orderer(tier_policy="pgsdf", **tiers)
        monkeypatch.setenv("RAGORDER_TIER_POLICY", "pgsdf")
        with pytest.raises(ValueError, match=said):
            Orderer()

    def test_a_wrong_value_names_the_field(self) -> None:
        wrong = {
            "capacity_tokens": [0, -5, "many"],
            "block_size": [0, 1.5],
            **dict.fromkeys(("prefix_tokens", "suffix_tokens", "keep_first", "keep_last", "max_displacement"), (-1,)),
            "best": ["middle"],
            "best_tokens": [-1],
            "keep_groups": ["perhaps"],
            "strict": [None],
        }
        for name, values in wrong.items():
            for value in values:
                assert re.search(rf"^{name}$", problem(**{name: value}), re.MULTILINE), (name, value)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (
                {"keep_first": 1, "keep_last": 1},
                "keep_first and keep_last exclude each other: keep the top documents at one end",
            ),
            (
                {"best": "first", "keep_last": 1},
                "best='first' and keep_last exclude each other: give keep_first, or leave one out",
            ),
            (
                {"best": "last", "keep_first": 1},
                "best='last' and keep_first exclude each other: give keep_last, or leave one out",
            ),
            (
                {"reuse": "fused", "events_endpoint": "tcp://h:1"},
                "reuse='fused' needs the embedded engine, which has no KV events: leave events_endpoint out",
            ),
        ],
        ids=str,
    )
    def test_settings_that_exclude_each_other_are_named(self, options: dict[str, Any], said: str) -> None:
        assert said in problem(**options)

    @pytest.mark.parametrize("best", ["first", "last"])
    def test_the_best_document_may_be_kept_at_its_own_end(self, best: str) -> None:
        assert Settings(**{"best": best, f"keep_{best}": 2}).best == best

    def test_settings_are_given_whole_or_by_name_but_not_both(self) -> None:
        with pytest.raises(TypeError, match="either settings or options, not both: block_size, strict"):
            Orderer(Settings(), strict=True, block_size=8)


@pytest.mark.parametrize("function", [Orderer.__init__, Orderer.for_vllm, Orderer.clone])
def test_type_checkers_see_every_setting_as_an_option(function: Any) -> None:
    declared = {name: field.annotation for name, field in Settings.model_fields.items()}
    assert typing.get_type_hints(OrdererOptions) == declared
    assert "Unpack[OrdererOptions]" in function.__annotations__.values()


def test_tokens_of_tiers_are_counted_once() -> None:
    tiers = {"capacity_tokens": 1_000, "host_tokens": 5_000, "disk_tokens": 3_000}
    assert Settings(**tiers, tier_copies="computed").held_tokens == 5_000
    assert Settings(**tiers, tier_copies="evicted").held_tokens == 9_000
    assert Settings(capacity_tokens=None, tier_copies="evicted").held_tokens is None
