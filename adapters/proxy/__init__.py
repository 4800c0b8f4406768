"""The proxy: an OpenAI-compatible server in front of another one, which orders the documents of the requests."""

from __future__ import annotations

try:
    import httpx  # noqa: F401
    import msgspec  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError(f"the proxy needs {error.name}: pip install 'ragorder[proxy]'", name=error.name) from error

from ragorder.adapters.proxy.app import make_app
from ragorder.adapters.proxy.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.turns import Turns
from ragorder.adapters.proxy.upstream import Timeouts

__all__ = ["DocumentTemplate", "TemplateError", "Timeouts", "Turns", "make_app"]
