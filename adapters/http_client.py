"""HTTP client of an OpenAI-compatible server."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ragorder.common.extras import needs
from ragorder.common.jsonl import decode, printable
from ragorder.errors import RagorderError

if TYPE_CHECKING:
    import httpx2

# Far above any expected answer, in bytes.
_LONGEST = 64 << 20


class ServerError(RagorderError, RuntimeError):
    """No usable answer. The message names the server's URL, without credentials, and what to change."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AddressError(ServerError):
    """An invalid server URL, or an API key that cannot be sent."""


class Server:
    """The server at `base_url` (with or without /v1).

        with Server("http://host:8000", timeout_s=10) as server:
            models = server.get_json("/v1/models")

    `api_key` is sent as a bearer token, user and password in the URL as basic authentication. Raises AddressError,
    ImportError without httpx2, and ServerError, also for an answer incomplete after `timeout_s`.
    """

    def __init__(self, base_url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        with needs("live", "talking to a server"):
            import httpx2
        self._httpx2 = httpx2
        url = self._parse(base_url)
        self.root = str(url.copy_with(username=None, password=None, query=None, fragment=None)).rstrip("/")
        self.root = self.root.removesuffix("/v1").rstrip("/")
        self.host = url.host
        self._timeout_s = timeout_s
        api_key = (api_key or "").strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise AddressError("the API key has characters that HTTP headers do not allow: is it the right one?")
        basic = (url.username, url.password) if url.userinfo and not api_key else None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A compressed answer may decompress to any length.
        headers["Accept-Encoding"] = "identity"
        # HTTP_PROXY is not used, since it would see the key: requests to the model go directly, too. Without trust_env,
        # certificates from the environment need an explicit context, as in the proxy.
        self._client = httpx2.Client(
            auth=basic,
            headers=headers,
            timeout=timeout_s,
            follow_redirects=True,
            verify=httpx2.create_ssl_context(),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str) -> str:
        return self._call("GET", path).decode("utf-8", "replace")

    def get_json(self, path: str) -> Any:
        return self._json(path, self._call("GET", path))

    def post_json(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        return self._json(path, self._call("POST", path, body, headers))

    def models(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models that have an id."""
        answer = self.get_json("/v1/models")
        listed = answer.get("data") if isinstance(answer, dict) else None
        entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return [each for each in entries if isinstance(each.get("id"), str)]

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        httpx2, where = self._httpx2, f"{self.root}{path}"
        late = f"{where} did not answer within {self._timeout_s:g} s: allow more time, or check the server's load"
        deadline = time.monotonic() + self._timeout_s
        chunks: list[bytes] = []
        length = 0
        try:
            with self._client.stream(method, where, json=body, headers=headers) as response:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise ServerError(
                        f"{where} sends compressed answers that were not requested: check whether a proxy before it "
                        "compresses them"
                    )
                # The client's timeout is for the next byte, not for the last one.
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    length += len(chunk)
                    if length > _LONGEST:
                        raise ServerError(f"{where} answers with more than {_LONGEST >> 20} MiB: check the address")
                    if time.monotonic() > deadline:
                        raise ServerError(late)
        except httpx2.TimeoutException:
            raise ServerError(late) from None
        except httpx2.ConnectError as error:
            message = f"{self.root} cannot be reached ({error}): check host and port, and that the server is up"
            raise ServerError(message) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            # Such an error's text may quote a header or a URL, and with it a key.
            message = f"{where} gave no answer in HTTP ({type(error).__name__}): check the port, and http or https"
            raise ServerError(message) from None
        if response.status_code in (401, 403):
            message = f"{where} refuses with HTTP {response.status_code}: give the server's key (RAGORDER_API_KEY)"
            raise ServerError(message, response.status_code)
        if not response.is_success:
            raise ServerError(f"{where} answers with HTTP {response.status_code}", response.status_code)
        return b"".join(chunks)

    def _json(self, path: str, content: bytes) -> Any:
        try:
            return decode(content)
        except ValueError:
            message = f"{self.root}{path} does not answer in JSON: give the address of an OpenAI-compatible server"
            raise ServerError(message, 200) from None

    def _parse(self, base_url: str) -> httpx2.URL:
        # Everything before an @ may be a password, even if the rest is no URL.
        shown = printable(re.sub(r"^(\w+://)?.*@", r"\1", base_url.partition("?")[0]))
        try:
            url = self._httpx2.URL(base_url.strip())
            # The resolver fails with UnicodeError for an empty label or a long one.
            url.raw_host.decode("ascii").encode("idna")
        except (self._httpx2.InvalidURL, ValueError):
            url = None
        if url is None or url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 65536:
            meant = "http://HOST:PORT"
            if re.fullmatch(r"[\w.-]+(:\d+)?(/[\w./-]*)?", shown):
                meant = f"http://{shown}"
            raise AddressError(f"{shown!r} is not the URL of a server: write {meant}")
        return url
