"""The part of a Schema Registry's HTTP API that readers and writers use, as a program:
``python3 registry_standin.py PORT [FILE]``. The file has the ``NAME:PASSWORD`` of its clients.

It is not a real registry: schemas are kept in memory, and only the fields of Avro records are
checked for compatibility, under subjects whose level is ``BACKWARD``; the others take any schema.
It uses only the standard library, so any Python can run it.

``PUT /standin/failing/N``: answer the next N requests with 503. ``GET /standin/requests``: how
often each path was requested. Both are for the process that started the program, and need no
password.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import threading
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

FIRST_ID = 100
Answer = tuple[int, Any]


class Registry:
    """Schemas by subject and version, and the count of requests."""

    def __init__(self, user: str | None) -> None:
        self._expected = f"Basic {base64.b64encode(user.encode()).decode()}" if user else None
        self._all: list[dict[str, Any]] = []
        self._levels: dict[str, str] = {}
        self._asked: dict[str, int] = {}
        self._failing = 0
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, authorization: str | None, body: bytes) -> Answer:
        """The status and the document of one request."""
        path, _, query = path.partition("?")
        form = urllib.parse.parse_qs(query).get("format", [""])[0]
        with self._lock:
            if path.startswith("/standin/"):
                return self._control(path)
            self._asked[path] = self._asked.get(path, 0) + 1
            if self._failing:
                self._failing -= 1
                return 503, {"error_code": 50301, "message": "not now"}
            if self._expected is not None and authorization != self._expected:
                return 401, {"error_code": 401, "message": "Unauthorized"}
            if found := re.fullmatch(r"/config/([^/]+)", path):
                self._levels[unquote(found[1])] = json.loads(body)["compatibility"]
                return 200, json.loads(body)
            if method == "POST":
                return self._posted(path, json.loads(body))
            if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
                return self._found([each for each in self._all if each["id"] == int(found[1])], 40403, "Schema", form)
            if found := re.fullmatch(r"/schemas/ids/(\d+)/subjects", path):
                subjects = [each["subject"] for each in self._all if each["id"] == int(found[1])]
                return (200, subjects) if subjects else self._found([], 40403, "Schema")
            if found := re.fullmatch(r"/subjects/([^/]+)/versions/(latest|\d+)", path):
                versions = self._versions(unquote(found[1]))
                if found[2] != "latest":
                    versions = [each for each in versions if each["version"] == int(found[2])]
                return self._found(versions, 40401, "Subject", form)
            return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _control(self, path: str) -> Answer:
        if found := re.fullmatch(r"/standin/failing/(\d+)", path):
            self._failing = int(found[1])
        return 200, dict(self._asked)

    def _versions(self, subject: str) -> list[dict[str, Any]]:
        return [each for each in self._all if each["subject"] == subject]

    def _posted(self, path: str, document: dict[str, Any]) -> Answer:
        found = re.fullmatch(r"(/compatibility)?/subjects/([^/]+)(/versions)?", path)
        if found is None:
            return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        subject = unquote(found[2])
        versions = self._versions(subject)
        same = [each for each in versions if _key(each) == _key(document)]
        if found[3] is None:
            return self._found(same, 40403 if versions else 40401, "Schema" if versions else "Subject")
        reasons = self._incompatible(subject, versions, document)
        if found[1]:
            if not versions:
                return self._found([], 40401, "Subject")
            return 200, {"is_compatible": not reasons, "messages": reasons}
        if same:
            return 200, {"id": same[-1]["id"]}
        if reasons:
            details = ", ".join(f"{{{each}}}" for each in reasons)
            said = f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details: [{details}]'
            return 409, {"error_code": 409, "message": said}
        return self._register(subject, document)

    def _register(self, subject: str, document: dict[str, Any]) -> Answer:
        known = {_key(each): each["id"] for each in self._all}
        entry = {
            "subject": subject,
            "version": 1 + len(self._versions(subject)),
            "id": known.get(_key(document), FIRST_ID + len(set(known.values()))),
            "schema": document["schema"],
            "references": document.get("references", []),
            "schemaType": document.get("schemaType", "AVRO"),
            "serialized": document.get("serialized"),
        }
        self._all.append(entry)
        return 200, {"id": entry["id"]}

    def _incompatible(self, subject: str, versions: list[dict[str, Any]], document: dict[str, Any]) -> list[str]:
        """Why a schema cannot read what was written with the latest, in the registry's words."""
        if self._levels.get(subject) != "BACKWARD" or not versions or document.get("schemaType", "AVRO") != "AVRO":
            return []
        old, new = (
            {each["name"]: each for each in json.loads(schema["schema"])["fields"]}
            for schema in (versions[-1], document)
        )
        reasons = []
        for place, (name, field) in enumerate(new.items()):
            if name not in old and "default" not in field:
                reasons.append(
                    "errorType:'READER_FIELD_MISSING_DEFAULT_VALUE', description:'The field '"
                    f"{name}' at path '/fields/{place}' in the new schema has no default value and is missing in the old schema'"
                )
            elif name in old and old[name]["type"] != field["type"]:
                reasons.append(
                    f"errorType:'TYPE_MISMATCH', description:'The type (path '/fields/{place}/type') of a field in the new "
                    f"schema does not match with the old schema', additionalInfo:'{name}'"
                )
        return reasons

    @staticmethod
    def _found(matching: list[dict[str, Any]], code: int, what: str, form: str = "") -> Answer:
        if not matching:
            return 404, {"error_code": code, "message": f"{what} not found"}
        found = {**matching[-1]}
        serialized = found.pop("serialized")
        return 200, {**found, "schema": serialized} if form == "serialized" and serialized else found


def _key(schema: dict[str, Any]) -> str:
    """What is the same for the same schema."""
    kind, text = schema.get("schemaType", "AVRO"), schema["schema"]
    if kind != "PROTOBUF":
        with suppress(ValueError):  # the bare name of an Avro type is no JSON
            text = json.loads(text)
    return json.dumps([kind, text, schema.get("references") or []])


def main(port: int, user: str | None) -> None:
    """Serve until SIGTERM."""
    registry = Registry(user)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, document = registry.answer(self.command, self.path, self.headers.get("Authorization"), body)
            answer = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    def end(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)  # the first process of a container ignores it by default
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else None)
