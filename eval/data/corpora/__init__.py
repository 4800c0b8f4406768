"""Corpora: documents, questions and rankings."""

from ragorder.common.corpus import CorpusError
from ragorder.eval.data.corpora.base import Corpus, CorpusQuestion
from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.corpora.pydocs import PYDOCS, load_asked, load_pydocs

__all__ = ["PYDOCS", "Corpus", "CorpusError", "CorpusQuestion", "load_asked", "load_folder", "load_pydocs"]
