"""Looks of policies, and lines that end where a sweep does."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ragorder.eval.report.canvas import draw, style
from ragorder.eval.suites.serving.sweeps import strokes

pytest.importorskip("matplotlib")


class TestLooks:
    def test_policies_without_their_own_differ_within_a_picture(self) -> None:
        names = ["turns", "append", "system", "front", "ours"]

        def paint(axes: Any) -> None:
            for place, name in enumerate([*names, *names]):
                axes.plot([0, 1], [place, place], color=style(name).colour, label=name)

        points = re.search(r'data-points="([^"]*)"', draw(paint, title="t", alt="a").svg)
        colours = {found[-1] for found in json.loads(points[1].replace("&quot;", '"'))}
        assert len(colours) == len(names)

    def test_those_with_one_keep_it(self) -> None:
        assert style("earned") == style("earned") != style("retrieval")
        assert style("random") == style("none")

    def test_what_one_picture_has_taken_is_free_in_the_next(self) -> None:
        taken: list[str] = []

        def paint(name: str, _: Any) -> None:
            taken.append(style(name).colour)

        for name in ("turns", "append"):
            draw(partial(paint, name), title="t", alt="a")
        assert taken[0] == taken[1]


class TestLines:
    def parts(self, x: str, *values: Any) -> list[list[int]]:
        panel: Any = [SimpleNamespace(cell={x: value}) for value in values]
        return [
            [point[0] for point in part] for part in strokes(panel, x, [(at, 0, 0, 0) for at in range(len(values))])
        ]

    def test_end_with_their_sweep(self) -> None:
        found = self.parts("workload", "unique", "ov0.0-kept", "ov0.2-kept", "ov0.0", "ov0.2", "ov0.4")
        assert found == [[0], [1, 2], [3, 4, 5]]

    def test_of_a_size_go_through(self) -> None:
        assert self.parts("capacity_tokens", 1000, "5%", None) == [[0, 1, 2]]
