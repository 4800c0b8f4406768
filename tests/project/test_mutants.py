"""Mutants: which changes are made to code, and which are not."""

from __future__ import annotations

import ast

from support.mutants import AREAS, find_mutants, mutants_of, mutated

SOURCE = '''"""A module with 2 numbers."""

LIMIT = 3


@cache(5)
def f(x: int = 0, é: str = "é") -> int | None:
    """Two < three."""
    if x < 1 and not é:
        raise ValueError(f"{x + 1} < 2")
    x += 7
    log.info(x)
    return x * 2
'''.encode()


def changes() -> list[tuple[str, str]]:
    return [(each.before, each.after) for each in mutants_of("trie", "f.py", SOURCE)]


def test_change_operators_numbers_and_statements_of_functions() -> None:
    assert changes() == [
        ("x < 1 and not é", "(x < 1 or not é)"),
        ("x < 1", "(x <= 1)"),
        ("1", "(2)"),
        ("not é", "(é)"),
        ("x += 7", "pass"),
        ("7", "(8)"),
        ("log.info(x)", "pass"),
        ("x * 2", "(x // 2)"),
        ("2", "(3)"),
    ]


def test_are_programs_that_differ_in_one_place() -> None:
    for mutant in mutants_of("trie", "f.py", SOURCE):
        after = mutated(mutant, SOURCE)
        ast.parse(after)
        assert after != SOURCE and len(after.splitlines()) == len(SOURCE.splitlines())


def test_are_found_in_every_area() -> None:
    assert {mutant.area for mutant in find_mutants()} == AREAS.keys()
