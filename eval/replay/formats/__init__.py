"""Formats of logs, by the name of the option: ragorder's own, and exports of other software."""

from ragorder.eval.replay.formats.base import ExportLine, OwnLine
from ragorder.eval.replay.formats.exports import LangfuseObservation, LangSmithRun, LiteLLMSpendLog, MooncakeRequest
from ragorder.eval.replay.formats.otel import MLflowTrace, OTelTraces

__all__ = ["FORMATS", "ExportLine"]

FORMATS: dict[str, type[ExportLine]] = {
    "ragorder": OwnLine,
    "mooncake": MooncakeRequest,
    "langfuse": LangfuseObservation,
    "langsmith": LangSmithRun,
    "otel": OTelTraces,
    "mlflow": MLflowTrace,
    "litellm": LiteLLMSpendLog,
}
