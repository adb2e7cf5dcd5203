"""A small Schema Registry: the part of its HTTP API that readers use, over real HTTP."""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Registered:
    """One version of a subject."""

    subject: str
    version: int
    schema_id: int
    schema: str
    references: list[dict[str, Any]] = field(default_factory=list)
    schema_type: str = "AVRO"

    def document(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "version": self.version,
            "id": self.schema_id,
            "schema": self.schema,
            "references": self.references,
            "schemaType": self.schema_type,
        }


class SchemaRegistry:
    """Serves what ``register`` was given. ``user``: demand basic authentication, as ``name:password``. ``requests`` counts
    what was asked, by path."""

    def __init__(self, user: str | None = None) -> None:
        self.user = user
        self.requests: dict[str, int] = {}
        self.failing = 0  # the next so many requests are answered with 503
        self._all: list[Registered] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, document = registry._answer(self.path, self.headers.get("Authorization"))
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def register(
        self, subject: str, schema: Any, references: list[dict[str, Any]] | None = None, schema_type: str = "AVRO"
    ) -> int:
        """Returns the schema's id."""
        version = 1 + sum(each.subject == subject for each in self._all)
        text = schema if isinstance(schema, str) else json.dumps(schema)
        schema_id = 100 + len(self._all)
        self._all.append(Registered(subject, version, schema_id, text, references or [], schema_type))
        return schema_id

    def _answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, Any]]:
        path = path.partition("?")[0]
        self.requests[path] = self.requests.get(path, 0) + 1
        if self.failing:
            self.failing -= 1
            return 503, {"error_code": 50301, "message": "not now"}
        if self.user is not None and authorization != f"Basic {base64.b64encode(self.user.encode()).decode()}":
            return 401, {"error_code": 401, "message": "Unauthorized"}
        if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
            matching = [each for each in self._all if each.schema_id == int(found[1])]
            return (
                (200, matching[0].document())
                if matching
                else (404, {"error_code": 40403, "message": "Schema not found"})
            )
        if found := re.fullmatch(r"/subjects/([^/]+)/versions/(latest|\d+)", path):
            matching = [each for each in self._all if each.subject == found[1]]
            if found[2] != "latest":
                matching = [each for each in matching if each.version == int(found[2])]
            return (
                (200, matching[-1].document())
                if matching
                else (404, {"error_code": 40401, "message": "Subject not found"})
            )
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
