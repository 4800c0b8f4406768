"""Certificate of a server, and its key."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

__all__ = ["Certificate"]


class Certificate(NamedTuple):
    """Files in PEM format; without `key` the first one has both."""

    file: Path
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError for unreadable files, ValueError for files without a certificate and its key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.file, self.key, password="")
        except ssl.SSLError as error:
            reason = (error.reason or "not in PEM format").lower().replace("_", " ")
            raise ValueError(
                f"no certificate with its key, or the key is encrypted ({reason}): give unencrypted PEM files"
            ) from None
        return context
