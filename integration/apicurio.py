"""Apicurio Registry, which answers as a Schema Registry."""

from __future__ import annotations

import json
import tarfile
import urllib.request
from pathlib import Path

from integration.errors import ServerError
from integration.jars import APICURIO_VERSION, Progress, apicurio_archive
from integration.java import find_java
from integration.server import Server, exchange
from integration.server_launcher import EMBEDDED

_HEAP = "-Xmx300m"
_ANSWER_TIMEOUT_S = 60.0
_PATH = "/apis/ccompat/v7"


class ApicurioServer(Server):
    """An Apicurio Registry that keeps schemas in memory, until it is stopped. ``url``: where it
    speaks the API of Confluent's Schema Registry. Always a process of this machine.

    It serves Protobuf schemas as they were registered, so those that a program registered in the
    serialized form only.
    """

    name = "apicurio"
    kind = "connect"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, where=EMBEDDED)
        self._progress = progress

    @property
    def url(self) -> str:
        return f"http://{self.address}{_PATH}"

    def prepare(self) -> list[str]:
        program = self.folder / "program"
        if not program.exists():
            try:
                with tarfile.open(apicurio_archive(self._progress)) as archive:
                    archive.extractall(program, filter="data")
            except (OSError, tarfile.TarError) as error:
                raise ServerError(f"{program}: {error}; make room or give another folder") from error
        settings = [f"-Dquarkus.http.port={self.port}", "-Dquarkus.http.host=127.0.0.1", "-Dquarkus.log.level=WARN"]
        jar = program / f"apicurio-registry-app-{APICURIO_VERSION}-runner.jar"
        return [find_java(), _HEAP, *self.java_options, *self.java_files(), *settings, "-jar", str(jar)]

    def is_ready(self) -> bool:
        answer = exchange(self.port, f"GET {_PATH}/subjects HTTP/1.0\r\n\r\n".encode())
        return answer.partition(b" ")[2].startswith(b"200")

    def check_compatibility(self, subject: str) -> None:
        """Refuse schemas for this subject, which there must be, that do not read what was written
        with its latest: ``BACKWARD``. Otherwise a subject takes any schema."""
        document = json.dumps({"compatibility": "BACKWARD"}).encode()
        request = urllib.request.Request(f"{self.url}/config/{subject}", document, method="PUT")
        request.add_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S):
            pass
