"""Mutants: small changes of the code that a test should notice, drawn at random: `make mutants`.

    python -m support.mutants --seed 0 --count 20 --minutes 30 --results mutants.jsonl

They run in a copy of the repository. A module's tests are the files that name it or, if none does,
its package; else those of its folder.
Each result is a line of the file of results, and what stands there is not run again.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import click
import pytest

from support.links import restore_links

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    "trie": ("trie/**/*.py", ("tests/trie",)),
    "pipelining": ("pipelining/**/*.py", ("tests/pipelining",)),
    "engine": ("kernels/**/*.py", ("tests/kernels",)),
    "proxy": ("adapters/{proxy/**/*,http_server/*}.py", ("tests/adapters",)),
    "adapters": ("adapters/**/*.py", ("tests/adapters",)),
    "eval": ("eval/**/*.py", ("tests/eval",)),
    "core": ("ragorder/{*,*/*,*/*/*}.py", ("tests/core", "tests/cli")),
}
"""By area: its files that no earlier area has, and the folders of tests for modules that no test file names."""
_LIMIT_S = 300.0
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change: the bytes `start` to `end` of a file become `after`."""

    area: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    source: str
    """Digest of the file, so that a result is of this code."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return (self.file, self.start, self.after, self.source)


def find_mutants(root: Path = ROOT) -> list[Mutant]:
    """All of them, in a fixed order."""
    root, found = root.resolve(), dict[Path, list[Mutant]]()
    for area, (pattern, _) in AREAS.items():
        # `ragorder` has links to the other packages.
        files = {path for path in _glob(root, pattern) if path.resolve() == path}
        for path in sorted(files - found.keys()):
            found[path] = list(mutants_of(area, path.relative_to(root).as_posix(), path.read_bytes()))
    return [mutant for mutants in found.values() for mutant in mutants]


def mutants_of(area: str, file: str, source: bytes) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    digest = blake2b(source, digest_size=6).hexdigest()
    for node in _executed(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = source[start:end].decode()
        for after in _changes(node):
            yield Mutant(area, file, node.lineno, start, end, before, after, digest)


def mutated(mutant: Mutant, source: bytes) -> bytes:
    return source[: mutant.start] + mutant.after.encode() + source[mutant.end :]


def run_mutants(mutants: list[Mutant], results: Path, minutes: float) -> None:
    """Those that have no result yet, as long as the time allows."""
    until = time.monotonic() + minutes * 60
    known = {tuple(each["key"]) for each in _read(results)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = _copy(Path(folder) / "copy")
        without: dict[tuple[str, ...], str] = {}
        for mutant in mutants:
            if mutant.key in known or time.monotonic() > until:
                continue
            # All tests of the files may be slow.
            for tests in (_tests(copy, mutant), AREAS[mutant.area][1]):
                if tests not in without:
                    without[tests] = _run(copy, tests)[0]
                if without[tests] != "no tests":
                    break
            target = copy / mutant.file
            source = target.read_bytes()
            start = time.monotonic()
            target.write_bytes(mutated(mutant, source))
            try:
                verdict, said = _run(copy, tests) if without[tests] == "survived" else ("tests fail without it", "")
            finally:
                target.write_bytes(source)
            line = asdict(mutant) | {"key": mutant.key, "verdict": verdict, "test": said, "tests": tests}
            line["seconds"] = round(time.monotonic() - start, 1)
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            click.echo(f"{verdict:9} {mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}")


def _changes(node: ast.expr | ast.stmt) -> list[str]:
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ["pass"]
    other: ast.expr
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        operators = [_OPERATORS[type(node.ops[0])](), *node.ops[1:]]
        other = ast.Compare(node.left, operators, node.comparators)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        other = ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        other = ast.BoolOp(_OPERATORS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        other = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        other = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        other = ast.Constant(node.value + 1)
    else:
        return []
    return [f"({ast.unparse(other)})"]


def _executed(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes of function bodies, without annotations, messages of errors and text that is put together."""
    skipped = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)

    def walk(node: ast.AST, inside: bool) -> Iterator[ast.expr | ast.stmt]:
        if isinstance(node, skipped):
            return
        if inside and isinstance(node, ast.expr | ast.stmt):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            body = inside or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, body)

    return walk(tree, False)


def _glob(root: Path, pattern: str) -> set[Path]:
    head, brace, tail = pattern.partition("{")
    names, _, end = tail.partition("}")
    patterns = [f"{head}{name}{end}" for name in names.split(",")] if brace else [pattern]
    return {path for each in patterns for path in root.glob(each) if path.name != "__init__.py"}


def _tests(root: Path, mutant: Mutant) -> tuple[str, ...]:
    path = mutant.file.removesuffix(".py").removeprefix("ragorder/")
    name = ["ragorder", *path.split("/")]
    files = sorted((root / "tests").rglob("test_*.py"), key=lambda file: (file.stat().st_size, file.name))
    texts = {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files}
    # What a package re-exports is tested under its name.
    while len(name) > 2:
        if naming := tuple(file for file, text in texts.items() if ".".join(name) in text):
            return naming
        name.pop()
    return AREAS[mutant.area][1]


def _run(copy: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    """The verdict, and the test that gave it."""
    chosen = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not vllm"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *chosen, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return "no tests", ""
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("survived", "") if done.returncode == 0 else ("killed", " ".join(failed[:1]))


def _copy(target: Path) -> Path:
    git = shutil.which("git") or "git"
    listing = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("docs/results/"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    restore_links(target)
    return target


def _read(results: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []


def _table(lines: list[dict[str, object]]) -> Iterator[str]:
    yield "| area | mutants | killed | survived | score |\n|---|--:|--:|--:|--:|"
    for area in [*AREAS, "all"]:
        verdicts = Counter(str(each["verdict"]) for each in lines if area in ("all", each["area"]))
        killed = verdicts["killed"] + verdicts["timeout"]
        judged = killed + verdicts["survived"]
        score = f"{killed / judged:.0%}" if judged else "-"
        yield f"| {area} | {judged} | {killed} | {verdicts['survived']} | {score} |"


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option("--count", default=20, show_default=True, help="Mutants in the sample.")
@click.option("--minutes", default=30.0, show_default=True, help="Begin no mutant after these; the next call goes on.")
@click.option("--area", "areas", multiple=True, type=click.Choice([*AREAS]), help="Only of these. Repeatable.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("mutants.jsonl"), show_default=True)
def main(seed: int, count: int, minutes: float, areas: tuple[str, ...], results: Path) -> None:
    """Change the code at random places, and count what the tests notice."""
    found = [each for each in find_mutants() if not areas or each.area in areas]
    sample = random.Random(seed).sample(found, min(count, len(found)))
    run_mutants(sample, results, minutes)
    keys = {each.key for each in sample}
    lines = [each for each in _read(results) if tuple(each["key"]) in keys]  # type: ignore[arg-type]
    click.echo(f"\n{len(lines)} of {len(sample)} mutants, drawn from {len(found)} with seed {seed}\n")
    for row in _table(lines):
        click.echo(row)


if __name__ == "__main__":
    main()
