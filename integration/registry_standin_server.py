"""A server that replaces a Schema Registry in tests."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

from integration.server import Server, exchange

_PROGRAM = Path(__file__).with_name("registry_standin.py")
_ANSWER_TIMEOUT_S = 60.0


class RegistryServer(Server):
    """Serves the schemas given to ``register``, until it is stopped. ``user``: ``name:password``;
    clients must then authenticate (HTTP basic)."""

    name = "registry"
    kind = "registry"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        user: str | None = None,
        guarded: bool = True,
        where: str | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, where=where)
        self.user = user

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def prepare(self) -> list[str]:
        program = shutil.copy(_PROGRAM, self.folder / _PROGRAM.name)
        login = [str(self.write("user", self.user, secret=True))] if self.user else []
        return [self.host.program("python3"), str(program), str(self.port), *login]

    def is_ready(self) -> bool:
        return exchange(self.port, b"GET /standin/requests HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.")

    def register(
        self,
        subject: str,
        schema: Any,
        references: list[dict[str, Any]] | None = None,
        schema_type: str = "AVRO",
        *,
        serialized: str | None = None,
    ) -> int:
        """Add a version to a subject, unless it has the schema. Returns the id of the schema.
        ``serialized``: the schema for clients that request the serialized form."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        document = {"schema": text, "references": references or [], "schemaType": schema_type, "serialized": serialized}
        found: int = self._ask("POST", f"/subjects/{subject}/versions", document)["id"]
        return found

    def check_compatibility(self, subject: str) -> None:
        """Refuse Avro schemas for this subject that do not read what was written with its latest:
        ``BACKWARD``. Otherwise a subject takes any schema."""
        self._ask("PUT", f"/config/{subject}", {"compatibility": "BACKWARD"})

    def fail_next(self, requests: int) -> None:
        """Answer this many of the next requests with 503."""
        self._ask("PUT", f"/standin/failing/{requests}")

    @property
    def requests(self) -> dict[str, int]:
        """How often each path was requested."""
        return dict(self._ask("GET", "/standin/requests"))

    def _ask(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        body = json.dumps(document).encode() if document is not None else None
        request = urllib.request.Request(self.url + path, body, method=method)
        if self.user:
            request.add_header("Authorization", f"Basic {base64.b64encode(self.user.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
