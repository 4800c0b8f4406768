"""Corpora: documents, questions and what a retriever found for them."""

from ragorder.eval.corpora.base import Corpus, CorpusError, Question
from ragorder.eval.corpora.folder import load_folder
from ragorder.eval.corpora.pydocs import load_pydocs

__all__ = ["Corpus", "CorpusError", "Question", "load_folder", "load_pydocs"]
