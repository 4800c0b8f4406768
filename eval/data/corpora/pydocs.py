"""A corpus on every machine: the documentation of Python's standard library."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from random import Random

from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusError, CorpusQuestion
from ragorder.eval.data.retrieval import BM25Retriever, Retriever

__all__ = ["PYDOCS", "load_pydocs"]

PYDOCS = "pydocs"
"""The corpus' name."""

_NAME = "pydocs"
_SKIPPED = {"antigravity", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "this", "turtledemo"}
_QUESTIONS = 600
_SESSION = range(6, 11)
_MINIMUM, _MAXIMUM = 600, 1200  # characters, 150 to 300 tokens

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _Entry:
    """A module (`name` is empty), class, function, or method (`owner` is its class)."""

    module: str
    name: str
    owner: str
    signature: str
    text: str
    parameters: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def spoken(self) -> str:
        return self.name if "." in self.name else self.title


def load_pydocs(*, retriever: Retriever | None = None, top_k: int = 20, cache: Path | None = None) -> Corpus:
    """The standard library's docstrings with signatures, and about 600 questions in sessions on one topic.

    Modules are read from source, not imported. Deterministic for an installation. `cache` is a folder for the result.
    Raises CorpusError without the sources, ValueError for `top_k` < 1."""
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    retriever = BM25Retriever() if retriever is None else retriever
    root = Path(sysconfig.get_path("stdlib"))
    modules = dict(_modules(root, ""))
    if not modules:
        raise CorpusError(f"{root}: holds no Python sources: install the standard library's .py files")
    if cache is None:
        return _build(modules, retriever, top_k)
    path = cache / f"{_NAME}-{_fingerprint(modules, retriever, top_k)}.json"
    corpus = _restore(path)
    if corpus is None:
        corpus = _build(modules, retriever, top_k)
        _keep(corpus, path)
    return corpus


def _build(modules: dict[str, Path], retriever: Retriever, top_k: int) -> Corpus:
    entries = {module: list(_entries(module, path)) for module, path in modules.items()}
    documents = [document for module in entries for document in _chunks(module, entries[module])]
    questions = list(_questions([session for module in entries for session in _sessions(entries[module])]))
    rankings = retriever.search([document.text for document in documents], [q.text for q in questions], top_k)
    return Corpus(_NAME, documents, questions, rankings)


def _modules(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name == "__init__.py" and package:
            yield package, path
        elif path.name.startswith("_") or path.stem in _SKIPPED:
            continue
        elif path.suffix == ".py":
            yield f"{package}.{path.stem}".lstrip("."), path
        elif (path / "__init__.py").is_file():
            yield from _modules(path, f"{package}.{path.name}".lstrip("."))


def _entries(module: str, path: Path) -> Iterator[_Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    text = ast.get_docstring(tree)
    if text:
        yield _Entry(module, "", "", module, text)
    known: set[str] = set()
    for node in _definitions(tree):
        if node.name in known:
            continue
        known.add(node.name)
        if isinstance(node, ast.ClassDef):
            yield from _class_entries(module, node)
        else:
            yield from _function_entry(module, node.name, "", node)


def _class_entries(module: str, node: ast.ClassDef) -> Iterator[_Entry]:
    methods: dict[str, _Function] = {}
    for child in node.body:
        if isinstance(child, _Function) and (child.name not in methods or not ast.get_docstring(methods[child.name])):
            methods[child.name] = child
    constructor = methods.get("__init__")
    parts = [ast.get_docstring(node), ast.get_docstring(constructor) if constructor else None]
    text = "\n\n".join(part for part in parts if part)
    parameters = _parameters(constructor) if constructor else []
    if text:
        signature = f"class {module}.{node.name}{_arguments(constructor) if constructor else ''}"
        yield _Entry(module, node.name, node.name, signature, text, parameters)
    for name, method in methods.items():
        if not name.startswith("_"):
            yield from _function_entry(module, f"{node.name}.{name}", node.name, method)


def _function_entry(module: str, name: str, owner: str, node: _Function) -> Iterator[_Entry]:
    text = ast.get_docstring(node)
    if text:
        yield _Entry(module, name, owner, f"{module}.{name}{_arguments(node)}", text, _parameters(node))


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | _Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | _Function):
            if not child.name.startswith("_"):
                yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child)


def _arguments(node: _Function) -> str:
    return f"({re.sub(r'^(self|cls)(, /)?(, |$)', '', ast.unparse(node.args))})"


def _parameters(node: _Function) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def _chunks(module: str, entries: Iterable[_Entry]) -> Iterator[Document]:
    """Neighbouring entries packed; a long one is cut at its paragraphs."""
    counts: dict[str, int] = {}
    batch: list[tuple[_Entry, str]] = []
    size = 0

    def flush() -> Document:
        entry = batch[0][0]
        number = counts[entry.name] = counts.get(entry.name, 0) + 1
        suffix = f"/{number}" if entry.name and number > 1 else ""
        text = "\n\n".join(part for _, part in batch)
        metadata = {"source": module, "title": entry.title}
        return Document(f"{module}#{entry.name or number}{suffix}", text, metadata=metadata)

    for entry in entries:
        for number, body in enumerate(_pieces(entry.text)):
            part = f"{entry.signature if number == 0 else entry.title + ' (continued)'}\n{body}"
            starts_class = number == 0 and entry.owner == entry.name
            if batch and (size + len(part) > _MAXIMUM or (starts_class and size >= _MINIMUM)):
                yield flush()
                batch, size = [], 0
            batch.append((entry, part))
            size += len(part) + 2
    if batch:
        yield flush()


def _pieces(text: str) -> list[str]:
    """Text cut at blank lines; a long paragraph at line ends."""
    pieces = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        separator = "\n\n"
        for part in [paragraph] if len(paragraph) <= _MAXIMUM else paragraph.splitlines():
            if pieces[-1] and len(pieces[-1]) + len(part) > _MAXIMUM - 100:
                pieces.append("")
            pieces[-1] += (separator if pieces[-1] else "") + part
            separator = "\n"
    return pieces


def _sessions(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Runs of neighbouring entries: a class with its methods if it has enough, else neighbours."""
    groups: list[list[_Entry]] = []
    for entry in entries:
        if not entry.name:
            continue
        if groups and entry.owner == groups[-1][-1].owner:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    merged: list[list[_Entry]] = []
    for group in groups:
        if merged and len(merged[-1]) < _SESSION[0]:
            merged[-1].extend(group)
        else:
            merged.append(group)
    for group in merged:
        count = -(-len(group) // _SESSION[-1])
        bounds = [len(group) * part // count for part in range(count + 1)]
        for start, end in pairwise(bounds):
            if end - start in _SESSION:
                yield group[start:end]


def _questions(sessions: list[list[_Entry]]) -> Iterator[CorpusQuestion]:
    random = Random(0)
    random.shuffle(sessions)
    asked = 0
    for number, session in enumerate(sessions):
        if asked >= _QUESTIONS:
            return
        for position, entry in enumerate(session):
            before = session[position - 1] if position else None
            phrasings = [texts for template in _TEMPLATES if (texts := template(entry, before))]
            yield CorpusQuestion(f"session-{number}/{position}", random.choice(random.choice(phrasings)))
        asked += len(session)


def _ask_how(entry: _Entry, before: _Entry | None) -> list[str]:
    name = entry.spoken if before else entry.title
    return [f"How does {name} work?", f"What does {name} do?", f"When do I need {name}?", f"What is {name} for?"]


def _ask_task(entry: _Entry, before: _Entry | None) -> list[str]:
    verb, _, rest = _sentences(entry.text)[0].partition(" ")
    if not _VERB.fullmatch(verb) or not 2 <= len(rest.split()) <= 18 or rest.count("(") != rest.count(")"):
        return []
    task = f"{'get' if verb == 'Return' else verb.lower()} {rest}"
    return [f"How do I {task} in {entry.module}?", f"Can {entry.module} {task}?", f"I want to {task}. What do I call?"]


def _ask_condition(entry: _Entry, before: _Entry | None) -> list[str]:
    for sentence in _sentences(entry.text):
        found = re.match(r"(?:If|When) ([a-z*'`][^,;()\"]{8,80}), ", sentence)
        if found:
            return [f"What happens when {found.group(1)} in {entry.spoken}?"]
    return []


def _ask_detail(entry: _Entry, before: _Entry | None) -> list[str]:
    for sentence in _sentences(entry.text)[1:]:
        if re.fullmatch(r"[A-Z][\w ,'`*()-]+", sentence) and 6 <= len(sentence.split()) <= 25:
            return [
                f'The documentation of {entry.spoken} says "{sentence}": what does that mean?',
                f'I read this about {entry.spoken}: "{sentence}". Why?',
            ]
    return []


def _ask_parameter(entry: _Entry, before: _Entry | None) -> list[str]:
    for parameter in entry.parameters:
        if len(parameter) > 3 and re.search(rf"\b{re.escape(parameter)}\b", entry.text):
            return [
                f"What is the argument {parameter} of {entry.spoken} for?",
                f"Which {parameter} can I pass to {entry.spoken}?",
            ]
    return []


def _ask_error(entry: _Entry, before: _Entry | None) -> list[str]:
    found = re.search(r"\b[A-Z]\w*(?:Error|Exception)\b", entry.text)
    if not found or found.group() in entry.name:
        return []
    return [f"Why does {entry.spoken} raise {found.group()}?", f"I get {found.group()} from {entry.spoken}. Why?"]


def _ask_difference(entry: _Entry, before: _Entry | None) -> list[str]:
    if before is None or before.owner != entry.owner or ("." in before.name) != ("." in entry.name):
        return []
    return [
        f"What is the difference between {before.spoken} and {entry.spoken}?",
        f"Should I use {before.spoken} or {entry.spoken}?",
    ]


def _sentences(text: str) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|[.:;](?=\s|$)", text) if part.strip()] or [""]


_VERB = re.compile(
    r"Accept|Add|Append|Apply|Build|Call|Cancel|Change|Check|Clear|Close|Compare|Compute|Connect|Construct|"
    r"Convert|Copy|Count|Create|Decode|Define|Delete|Determine|Display|Encode|Execute|Expand|Extract|Fetch|Find|"
    r"Format|Generate|Get|Insert|Install|List|Load|Look|Make|Move|Open|Parse|Print|Put|Query|Raise|Read|Register|"
    r"Release|Remove|Rename|Replace|Report|Reset|Retrieve|Return|Run|Search|Send|Set|Shut|Sort|Split|Start|Stop|"
    r"Store|Test|Turn|Unregister|Update|Use|Wait|Write"
)
_TEMPLATES: tuple[Callable[[_Entry, _Entry | None], list[str]], ...] = (
    _ask_how,
    _ask_task,
    _ask_condition,
    _ask_detail,
    _ask_parameter,
    _ask_error,
    _ask_difference,
)


def _fingerprint(modules: dict[str, Path], retriever: Retriever, top_k: int) -> str:
    own = Path(__file__)
    parts = [sys.version, retriever.name, str(top_k)]
    for path in (own, own.parent.parent / "retrieval.py", *modules.values()):
        state = path.stat()
        parts.append(f"{path} {state.st_size} {state.st_mtime_ns}")
    return blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _restore(path: Path) -> Corpus | None:
    try:
        kept = json.loads(path.read_text("utf-8"))
        return Corpus(
            kept["name"],
            [Document(id, text, metadata=metadata) for id, text, metadata in kept["documents"]],
            [CorpusQuestion(id, text) for id, text in kept["questions"]],
            kept["rankings"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(corpus: Corpus, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "name": corpus.name,
        "documents": [[document.id, document.text, dict(document.metadata)] for document in corpus.documents],
        "questions": [[question.id, question.text] for question in corpus.questions],
        "rankings": corpus.rankings,
    }
    text = json.dumps(content)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
