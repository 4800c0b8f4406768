"""A corpus on every machine: the documentation of Python's standard library."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

from ragorder.common.corpus import CorpusError
from ragorder.common.extras import install_hint
from ragorder.common.jsonl import decode
from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusQuestion
from ragorder.eval.data.retrieval import BM25Retriever, Retriever
from ragorder.kernels.random_model import documentation
from ragorder.kernels.random_model.documentation import Entry

PYDOCS = "pydocs"
"""The corpus' name."""

_NAME = "pydocs"
_QUESTIONS = 600
_SESSION = range(6, 11)


def load_pydocs(*, retriever: Retriever | None = None, top_k: int = 20, cache: Path | None = None) -> Corpus:
    """The standard library's docstrings with signatures, and about 600 questions in sessions on one topic. Modules are
    read from source, not imported. Deterministic for an installation. `cache` is a folder for the result. Raises
    CorpusError without the sources, ValueError for `top_k` < 1."""
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    retriever = BM25Retriever() if retriever is None else retriever
    modules = documentation.library_modules()
    if not modules:
        raise CorpusError(_no_sources())
    if cache is None:
        return _build(modules, retriever, top_k)
    path = cache / f"{_NAME}-{_fingerprint(modules, retriever, top_k)}.json"
    corpus = _restore(path)
    if corpus is None:
        corpus = _build(modules, retriever, top_k)
        _keep(corpus, path)
    return corpus


def lacks_pydocs() -> str | None:
    """Return the reason why the corpus cannot be made here."""
    if find_spec("bm25s") is None:
        return f"corpus {PYDOCS} needs bm25s: {install_hint('eval')}"
    return None if documentation.library_modules() else f"corpus {PYDOCS}: {_no_sources()}"


def _no_sources() -> str:
    return f"{sysconfig.get_path('stdlib')}: holds no Python sources: install the standard library's .py files"


def load_asked(*, top_k: int = 20, cache: Path | None = None) -> Corpus:
    """The same documents, with pydocs.toml's questions and known answers, six about each of three modules. Raises as
    `load_pydocs`."""
    documents = load_pydocs(cache=cache).documents
    topics = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    questions = [
        CorpusQuestion(f"{module}/{number}", text, (answer,))
        for module, asked in topics.items()
        for number, (text, answer) in enumerate(asked.items())
    ]
    rankings = BM25Retriever().search([each.text for each in documents], [each.text for each in questions], top_k)
    return Corpus("questions about Python", documents, questions, rankings)


def _build(modules: dict[str, Path], retriever: Retriever, top_k: int) -> Corpus:
    entries = {module: documentation.read_entries(module, path) for module, path in modules.items()}
    documents = [
        Document(chunk.id, chunk.text, metadata={"source": module, "title": chunk.title})
        for module in entries
        for chunk in documentation.chunks_of(module, entries[module])
    ]
    questions = list(_questions([session for module in entries for session in _sessions(entries[module])]))
    rankings = retriever.search([document.text for document in documents], [q.text for q in questions], top_k)
    return Corpus(_NAME, documents, questions, rankings)


def _sessions(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Runs of neighbouring entries: a class with its methods if it has enough, else neighbours."""
    groups: list[list[Entry]] = []
    for entry in entries:
        if not entry.name:
            continue
        if groups and entry.owner == groups[-1][-1].owner:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    merged: list[list[Entry]] = []
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


def _questions(sessions: list[list[Entry]]) -> Iterator[CorpusQuestion]:
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


def _ask_how(entry: Entry, before: Entry | None) -> list[str]:
    name = entry.spoken if before else entry.title
    return [f"How does {name} work?", f"What does {name} do?", f"When do I need {name}?", f"What is {name} for?"]


def _ask_task(entry: Entry, before: Entry | None) -> list[str]:
    verb, _, rest = _sentences(entry.text)[0].partition(" ")
    if not _VERB.fullmatch(verb) or not 2 <= len(rest.split()) <= 18 or rest.count("(") != rest.count(")"):
        return []
    task = f"{'get' if verb == 'Return' else verb.lower()} {rest}"
    return [f"How do I {task} in {entry.module}?", f"Can {entry.module} {task}?", f"I want to {task}. What do I call?"]


def _ask_condition(entry: Entry, before: Entry | None) -> list[str]:
    for sentence in _sentences(entry.text):
        found = re.match(r"(?:If|When) ([a-z*'`][^,;()\"]{8,80}), ", sentence)
        if found:
            return [f"What happens when {found.group(1)} in {entry.spoken}?"]
    return []


def _ask_detail(entry: Entry, before: Entry | None) -> list[str]:
    for sentence in _sentences(entry.text)[1:]:
        if re.fullmatch(r"[A-Z][\w ,'`*()-]+", sentence) and 6 <= len(sentence.split()) <= 25:
            return [
                f'The documentation of {entry.spoken} says "{sentence}": what does that mean?',
                f'I read this about {entry.spoken}: "{sentence}". Why?',
            ]
    return []


def _ask_parameter(entry: Entry, before: Entry | None) -> list[str]:
    for parameter in entry.parameters:
        if len(parameter) > 3 and re.search(rf"\b{re.escape(parameter)}\b", entry.text):
            return [
                f"What is the argument {parameter} of {entry.spoken} for?",
                f"Which {parameter} can I pass to {entry.spoken}?",
            ]
    return []


def _ask_error(entry: Entry, before: Entry | None) -> list[str]:
    found = re.search(r"\b[A-Z]\w*(?:Error|Exception)\b", entry.text)
    if not found or found.group() in entry.name:
        return []
    return [f"Why does {entry.spoken} raise {found.group()}?", f"I get {found.group()} from {entry.spoken}. Why?"]


def _ask_difference(entry: Entry, before: Entry | None) -> list[str]:
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
_TEMPLATES: tuple[Callable[[Entry, Entry | None], list[str]], ...] = (
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
    for path in (own, own.parent.parent / "retrieval.py", Path(documentation.__file__), *modules.values()):
        state = path.stat()
        parts.append(f"{path} {state.st_size} {state.st_mtime_ns}")
    return blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _restore(path: Path) -> Corpus | None:
    try:
        kept = decode(path.read_bytes())
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
