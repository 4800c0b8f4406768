"""Replay of a log of past requests on a simulated cache."""

from ragorder.eval.replay.log import Log, LogBuilder, LogError
from ragorder.eval.replay.reading import DefaultLengths, read_log
from ragorder.eval.replay.report import ReplayReport
from ragorder.eval.replay.runs import REPLAY_POLICIES
from ragorder.eval.replay.sweep import DEFAULT_POLICIES, SWEEP, ReplayError, replay

__all__ = [
    "DEFAULT_POLICIES",
    "REPLAY_POLICIES",
    "SWEEP",
    "DefaultLengths",
    "Log",
    "LogBuilder",
    "LogError",
    "ReplayError",
    "ReplayReport",
    "read_log",
    "replay",
]
