"""What a Schema Registry answers, or something else at its address: bounded in size, time and
number, and never the fault of a record unless the registry says so (2.9)."""

from __future__ import annotations

import gzip
import json
import pickle
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError, RetryableError, TopologyError
from integration import RegistryServer
from spouts import RegistryAvroCodec
from spouts.codecs import registry_client, registry_codec, schema_cache
from tests.kit.avro import encoded, framed
from tests.kit.avro_fuzz import fuzz_answers
from tests.kit.registry_answers import answering, send

pytestmark = [pytest.mark.behaviour("2.9"), pytest.mark.integration]

SMALL = {"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}]}
GOOD = encoded(SMALL, {"word": "dog"})[0]
SCHEMA = json.dumps({"schema": json.dumps(SMALL)}).encode()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are repeated as often as always, without the time between."""
    monkeypatch.setattr(registry_codec, "_PAUSES_S", (0.001, 0.001))


def document(status: int, code: int) -> tuple[int, bytes]:
    return status, json.dumps({"error_code": code, "message": "no"}).encode()


NOT_A_REGISTRY = {
    "a page of a proxy": (404, b"<h1>not found</h1>"),
    "a wrong path": document(404, 404),
    "no JSON": (200, b"hello"),
    "another document": (200, b"[1, 2]"),
    "a number": (200, b"7"),
    "an empty answer": (200, b""),
    "no schema": (200, b'{"schema": null}'),
    "other references": (200, b'{"schema": "1", "references": 7}'),
    "brackets": (200, b"[" * 200_000),
    "another address": (302, b""),
}


@pytest.mark.parametrize("kind", NOT_A_REGISTRY)
def test_what_is_no_answer_of_a_registry_is_about_the_address(kind: str) -> None:
    with answering(lambda request, _: send(request, *NOT_A_REGISTRY[kind])) as (url, asked):
        codec = RegistryAvroCodec(url, schema=SMALL)
        with pytest.raises(
            ConfigError, match=f"{url} does not answer as a Schema Registry.*check the address"
        ) as error:
            codec.decode_good(framed(1, GOOD) + framed(2, GOOD))
        assert len(str(error.value)) < 600
        assert len(asked) == 3


@pytest.mark.parametrize("kind", ["a page of a proxy", "a wrong path", "no JSON", "a node that lags"])
def test_an_answer_that_is_wrong_for_a_moment_costs_no_record(kind: str) -> None:
    wrong = {**NOT_A_REGISTRY, "a node that lags": document(404, 40403)}[kind]
    with answering(lambda request, n: send(request, *(wrong if n <= 2 else (200, SCHEMA)))) as (url, asked):
        batch, bad = RegistryAvroCodec(url, schema=SMALL).decode_good(framed(1, GOOD) * 100)
        assert (batch.num_rows, bad, len(asked)) == (100, [], 3)


@pytest.mark.slow
def test_unknown_ids_are_asked_for_three_times_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and also in the next task of the process."""
    with answering(lambda request, _: send(request, *document(404, 40403))) as (url, asked):
        values = [value for n in range(1_000) for value in framed(n, GOOD)]
        codec = RegistryAvroCodec(url, schema=SMALL)
        for _ in range(5):
            _, bad = pickle.loads(pickle.dumps(codec)).decode_good(values)
            assert len(bad) == 1_000
            assert "does not know schema id 7" in bad[7].reason
            assert len(asked) == 3_000
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        codec.decode_good(values)
        assert len(asked) == 4_000  # once more after a while, for a schema may have come


def test_an_unknown_id_that_is_registered_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda request, n: send(request, *(document(404, 40403) if n <= 3 else (200, SCHEMA)))) as (url, _):
        codec = RegistryAvroCodec(url, schema=SMALL)
        assert len(codec.decode_good(framed(1, GOOD))[1]) == 1
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert codec.decode_good(framed(1, GOOD))[0].num_rows == 1


def test_bad_ids_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_codec, "_UNUSABLE_MAX", 10)
    with answering(lambda request, _: send(request, *document(404, 40403))) as (url, _):
        codec = RegistryAvroCodec(url, schema=SMALL)
        codec.decode_good([value for n in range(50) for value in framed(n, GOOD)])
        assert codec._writers is not None
        assert list(codec._writers._unusable) == list(range(40, 50))


@pytest.mark.slow
def test_large_schemas_do_not_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of one batch, as decoders or in the client, nor those of the batches before."""
    for module in (schema_cache, registry_client):
        monkeypatch.setattr(module, "KEPT_BYTES_MAX", 1 << 18)

    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        fields = [*SMALL["fields"], *({"name": f"f{number}_{n}", "type": ["null", "int"]} for n in range(500))]
        send(request, 200, json.dumps({"schema": json.dumps({**SMALL, "fields": fields})}).encode())

    with answering(answer) as (url, asked):
        codec = RegistryAvroCodec(url, schema=SMALL)
        codec.decode_good(framed(1_000, GOOD))  # imports the client
        tracemalloc.start()
        try:
            for batch in range(2):
                ids = range(batch * 20, batch * 20 + 20)
                assert (
                    codec.decode_good([value for n in ids for value in framed(n, GOOD + bytes(500))])[0].num_rows == 20
                )
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 8 << 20, (kept, most)
        assert len(asked) == 41
        codec.decode_good([value for n in (39, 0) for value in framed(n, GOOD + bytes(500))])
        assert len(asked) == 42  # the last is kept


def test_a_large_answer_is_not_read_to_its_end() -> None:
    sent: list[int] = []

    def answer(request: BaseHTTPRequestHandler, _: int) -> None:
        request.send_response(200)
        request.end_headers()
        sent.append(0)
        for _part in range(1_500):
            request.wfile.write(b" " * (1 << 20))
            sent[-1] += 1 << 20

    with answering(answer) as (url, _), pytest.raises(ConfigError, match="an answer of more than 16,777,216 bytes"):
        RegistryAvroCodec(url, schema=SMALL).decode_good(framed(1, GOOD))
    assert len(sent) == 3
    assert max(sent) < 4 * registry_client.ANSWER_BYTES_MAX


def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(b" " * (1 << 24) + SCHEMA)
    packed = answering(lambda request, _: send(request, 200, bomb, Content_Encoding="gzip"))
    with packed as (url, _), pytest.raises(ConfigError, match="a compressed answer"):
        RegistryAvroCodec(url, schema=SMALL).decode_good(framed(1, GOOD))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["head", "body", "nothing"])
def test_an_answer_byte_by_byte_does_not_hold_a_task(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "ANSWER_TIMEOUT_S", 2.0)
    over = threading.Event()

    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        if number > 1:
            send(request, 200, SCHEMA)
            return
        if part == "body":
            request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        elif part == "head":
            request.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not over.wait(0.05):
            if part != "nothing":
                request.wfile.write(b"x")

    with answering(answer) as (url, _):
        codec = RegistryAvroCodec({"url": url, "max.retries": 0}, schema=SMALL)
        with pytest.raises(RetryableError, match="no whole answer in 2 s"):
            codec.decode_good(framed(1, GOOD))
        assert codec.decode_good(framed(1, GOOD))[0].num_rows == 1
        over.set()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_registry_that_is_busy_is_waited_for(status: int) -> None:
    with answering(lambda request, _: send(request, status, b"<h1>busy</h1>" * 1_000)) as (url, _):
        codec = RegistryAvroCodec({"url": url, "max.retries": 0}, schema=SMALL)
        with pytest.raises(RetryableError, match=f"schema id 1: status {status}") as error:
            codec.decode_good(framed(1, GOOD))
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_credentials_do_not_follow_a_redirection(status: int) -> None:
    """The password is for one address; a registry has no reason to name another."""
    with answering(lambda request, _: send(request, 200, SCHEMA)) as (other, asked_there):

        def redirect(request: BaseHTTPRequestHandler, number: int) -> None:
            send(request, status, b"", Location=f"{other}{request.path}")

        with answering(redirect) as (url, asked):
            codec = RegistryAvroCodec({"url": url, "basic.auth.user.info": "ann:secret"}, schema=SMALL)
            with pytest.raises(ConfigError, match=f"{url} does not answer as a Schema Registry"):
                codec.decode_good(framed(1, GOOD))
            assert asked and not asked_there


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://me:my hunter2@127.0.0.1:1"},
        {"url": "http://me:hunter2\u2100@127.0.0.1:1"},
        {"url": "http://me:hun/ter2@127.0.0.1:1"},
        {"url": "http://me:hun,ter2@127.0.0.1:1"},
        {"url": "http://me:1,hunter2@127.0.0.1:1"},
        {"url": "http://me@srv:hunter2@127.0.0.1:1"},
        {"url": "http://127.0.0.1:1?apikey=hunter2"},
        {"url": "http://127.0.0.1:1#hunter2"},
        {"url": "ftp://me:hunter2@127.0.0.1:1"},
        {"url": "hunter2@127.0.0.1:1"},
        {"url": "http://127.0.0.1:1", "proxy": "u:hunter2@127.0.0.1:2"},
        {"url": "http://127.0.0.1:1", "proxy": "http://u:hun/ter2@127.0.0.1:2"},
        {"url": "http://127.0.0.1:1", "proxy": "http://u:hunter2\u2100@127.0.0.1:2"},
    ],
)
def test_an_address_that_ends_in_its_password_is_refused_without_it(settings: Any) -> None:
    with pytest.raises(ConfigError, match="does not parse") as refused:
        registry_client.RegistryClient(settings)
    assert "ter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@one:8081/api, https://two", "http://one:8081,https://two"),
        ("http://me:hun%2Fter2@[::1]:8081/api", "http://[::1]:8081"),
        ("http://one", "http://one"),
    ],
)
def test_messages_show_scheme_host_and_port(url: str, shown: str) -> None:
    assert registry_client.RegistryClient({"url": url}).where == shown


def test_what_the_client_says_is_shown_without_secrets() -> None:
    settings = {
        "url": "http://me:first%2Fhunter2@one",
        "proxy": "http://u:second-hunter2@two",
        "basic.auth.user.info": "u:third:hunter2",
        "ssl.key.password": "fourth-hunter2",
        "bearer.auth.token": "a\nfifth-hunter2",
    }
    client = registry_client.RegistryClient(settings)
    said = [*settings.values(), "first/hunter2", "third:hunter2", repr(settings)]
    for error in (OSError(" ".join(said)), ValueError(" ".join(said))):
        assert "hunter2" not in str(client._error(error, "a schema"))
    assert "hunter2" not in client._refused("a schema", " ".join(said))


def test_settings_that_the_client_refuses_are_shown_without_secrets() -> None:
    client = registry_client.RegistryClient({"url": "http://one", "basic.auth.user.info": "u:hunter2", "hunter2": "x"})
    with pytest.raises(ConfigError, match=r"Schema Registry settings: .*\(hidden\)"):
        client.subjects(1)


@pytest.mark.parametrize("status", [401, 403])
def test_a_registry_that_refuses_the_credentials_is_named_without_them(status: int) -> None:
    with answering(lambda request, _: send(request, *document(status, status * 100))) as (url, asked):
        codec = RegistryAvroCodec({"url": url, "basic.auth.user.info": "ann:secret"}, schema=SMALL)
        with pytest.raises(ConfigError, match=rf"refuses schema id 1 \({status}\): check its credentials") as error:
            codec.decode_good(framed(1, GOOD))
        assert "secret" not in str(error.value) and len(asked) <= 3


DEEP: Any = "int"
for _ in range(900):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps(DEEP), "nests more than 64"),
        ("/etc/schema.avsc", "is not defined"),
        ('"long"', "written as long, which is not read as Word"),
        (json.dumps({**SMALL, "fields": [{"name": "word", "type": "long"}]}), "written as long, which is not read as"),
    ],
    ids=lambda each: each[:30],
)
def test_a_schema_of_no_use_makes_its_values_bad(schema: str, reason: str) -> None:
    body = json.dumps({"schema": schema}).encode()
    with answering(lambda request, _: send(request, 200, body)) as (url, asked):
        codec = RegistryAvroCodec(url, schema=SMALL)
        for _ in range(3):
            batch, bad = codec.decode_good(framed(1, GOOD) * 10)
            assert (batch.num_rows, len(bad)) == (0, 10)
            assert bad[0].reason.startswith("schema id 1: ")
            assert reason in bad[0].reason
        assert len(asked) == 1


def test_references_that_do_not_end_make_a_schema_of_no_use() -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        references = [{"name": f"T{number}", "subject": f"s{number}", "version": 1}]
        found = {"schema": json.dumps(SMALL), "references": references, "subject": "s", "version": 1, "id": number}
        send(request, 200, json.dumps(found).encode())

    with answering(answer) as (url, asked):
        _, bad = RegistryAvroCodec(url, schema=SMALL).decode_good(framed(1, GOOD))
        assert "refers to more than 256 schemas" in bad[0].reason
        assert len(asked) < 300


class TestSubjects:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[RegistryServer]:
        with RegistryServer(tmp_path / "registry") as server:
            yield server

    def test_only_schemas_of_the_given_subjects_are_read(self, server: RegistryServer) -> None:
        mine = server.register("words-value", SMALL)
        foreign = server.register("attack", {**SMALL, "doc": "other"})
        values = framed(mine, GOOD) + framed(foreign, GOOD)
        anyone = RegistryAvroCodec(server.url, subject="words-value")
        assert anyone.decode_good(values)[0].num_rows == 2
        codec = RegistryAvroCodec(server.url, subject="words-value", writer_subjects=["words-value"])
        for _ in range(2):
            batch, bad = pickle.loads(pickle.dumps(codec)).decode_good(values)
            assert batch.num_rows == 1
            assert bad[0].index == 1
            assert bad[0].reason == f"schema id {foreign}: it is not of words-value, but of attack"
        assert server.requests[f"/schemas/ids/{foreign}/subjects"] == 1

    @pytest.mark.parametrize("subjects", [[], "words-value"])
    def test_subjects_are_a_list(self, server: RegistryServer, subjects: Any) -> None:
        with pytest.raises(TopologyError, match="writer_subjects must be a list"):
            RegistryAvroCodec(server.url, schema=SMALL, writer_subjects=subjects)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_answer_makes_anything_but_a_known_error(seed: int) -> None:
    counts = fuzz_answers(seed, 300)
    assert min(counts[each] for each in ("rows", "bad", "errors")) > 0, counts
