"""The list of bad input: each line names tests that check the message a user sees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from framework import Config
from framework.errors import ConfigError
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.topics import Topics

HERE = Path(__file__).parent
LIST: dict[str, dict[str, list[str]]] = {
    "configuration": {
        "missing servers": ["spouts/kafka/test_security.py::test_a_missing_variable_and_missing_brokers_are_named"],
        "unknown key": ["test_config.py::test_bad_values_are_refused_by_key"],
        "wrong type, zero, negative, huge": [
            "test_bad_input.py::test_a_setting_with_an_impossible_number_is_refused_by_its_key"
        ],
        "auto-commit, auto.offset.reset, read_uncommitted": [
            "spouts/kafka/test_security.py::test_a_setting_that_breaks_a_guarantee_is_refused_before_anything_starts"
        ],
        "timeouts beyond the server's limits": [
            "coordination/test_security.py::test_a_session_timeout_beyond_the_servers_limits_is_logged"
        ],
        "halves of credentials, missing files": [
            "coordination/test_security.py::test_incomplete_security_settings_and_missing_files_are_refused_before_connecting"
        ],
    },
    "topology": {
        "duplicate and unknown ids, cycle, dangling stream, unknown field, type clash, a committer that cannot commit, "
        "an unsafe pair of spout and state": ["topology/test_builder.py::test_build_bad_topology_is_refused_by_name"],
        "unpicklable bolt": ["topology/test_builder.py::test_submit_unpicklable_bolt_is_refused_by_name"],
        "ids with /, .., NUL, empty, over-long": ["topology/test_builder.py::test_build_unsafe_ids_are_refused"],
    },
    "messages": {
        "invalid UTF-8": ["spouts/codecs/test_codecs.py::test_text_invalid_utf8_is_named_by_its_index"],
        "invalid JSON, NaN, 1e400, an integer over 64 bits": [
            "spouts/codecs/test_codecs.py::test_json_bad_value_is_named_by_its_index"
        ],
        "invalid Avro": [
            "spouts/codecs/test_avro.py::test_damaged_values_are_found_and_take_nothing_from_their_neighbours"
        ],
        "unknown schema id": [
            "spouts/codecs/test_registry_answers.py::test_unknown_ids_are_asked_for_three_times_and_then_left_alone"
        ],
        "null key, null value, empty bytes": [
            "spouts/codecs/test_codecs.py::test_bytes_and_text_keep_null_and_empty_apart"
        ],
        "a null key of a state": ["sinks/test_state_committer.py::test_null_key_is_an_error_that_names_the_field"],
        "10 MB record": ["spouts/kafka/test_reading.py::test_a_record_of_10_mb_is_read"],
        "deep nesting": ["spouts/codecs/test_codecs.py::test_json_unusual_but_right_values_decode"],
        "timestamp -1": ["test_bad_input.py::test_a_record_without_a_timestamp_is_read"],
        "NUL in text for PostgreSQL": ["sinks/backends/test_postgres.py::test_text_with_nul_is_a_bad_record"],
        "every record bad": ["test_bad_input.py::test_when_every_record_is_bad_the_first_is_named"],
    },
    "sinks": {
        "table missing": ["sinks/backends/test_sqlite.py::test_rows_are_real_columns_with_stamp_and_previous_value"],
        "wrong columns": [
            "sinks/backends/test_sqlite.py::test_a_table_with_other_columns_is_refused_with_the_ddl",
            "sinks/backends/test_postgres.py::test_another_table_of_that_name_is_refused_with_the_statements_that_mend_it",
        ],
        "null stamps": ["faults/test_sinks.py::test_a_damaged_row_stops_the_topology_and_is_named"],
        "owned by another topology": ["pipeline/test_recovery.py::test_a_table_of_another_topology_is_refused"],
        "ahead of ZooKeeper": ["pipeline/test_recovery.py::test_a_wiped_store_under_a_live_sink_stops"],
        "read-only credentials": [
            "sinks/backends/test_postgres.py::test_rights_are_probed_before_the_first_batch",
            "sinks/backends/test_redis.py::test_users_and_their_rights_are_probed_before_the_first_batch",
        ],
        "Redis key of another type": [
            "sinks/backends/test_redis.py::test_keys_of_others_and_other_columns_are_refused"
        ],
        "foreign files in a folder": [
            "sinks/tables/test_file_tables.py::test_another_owner_other_columns_and_foreign_files_are_refused"
        ],
    },
    "ZooKeeper": {
        "garbage, newer format, non-numeric child": [
            "pipeline/test_recovery.py::test_corrupt_state_stops_the_start_and_is_named"
        ],
        "gap in txids": ["pipeline/test_recovery.py::test_a_missing_plan_of_the_last_transaction_is_named"],
        "over 1 MB": [
            "coordination/test_transactional_state.py::test_a_document_too_large_for_a_znode_is_refused_before_it_is_sent"
        ],
        "ACL denied": [
            "coordination/test_stores.py::test_zookeeper_acl_that_denies_is_named_and_credentials_protect_every_znode"
        ],
        "another Kafka cluster's state": [
            "pipeline/test_kafka_sources.py::test_another_cluster_is_refused_or_read_from_its_beginning"
        ],
        "changed topology on old state": [
            "pipeline/test_recovery.py::test_a_changed_topology_on_old_state_is_refused_with_the_difference"
        ],
    },
}
LINES = [(part, line, test) for part, lines in LIST.items() for line, tests in lines.items() for test in tests]


@pytest.mark.parametrize(("part", "line", "test"), LINES, ids=[f"{part}: {line}"[:60] for part, line, _ in LINES])
def test_each_kind_of_bad_input_has_a_test_that_asserts_something(part: str, line: str, test: str) -> None:
    """The test function exists, and it asserts something."""
    file, _, name = test.partition("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{test} is not there"
    source = ast.unparse(found[0])
    assert "assert " in source or "raises(" in source or "refused(" in source


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topology.max.spout.pending", 0),
        ("topology.max.spout.pending", -1),
        ("topology.max.spout.pending", 10**9),
        ("topology.max.spout.pending", "many"),
        ("topology.message.timeout.secs", 0),
        ("topology.message.timeout.secs", 10**9),
        ("transactional.zookeeper.port", 65_536),
        ("transactional.zookeeper.session.timeout.secs", 0.5),
        ("topology.collapse.records.max", -1),
        ("metrics.prometheus.port", 0),
    ],
)
def test_a_setting_with_an_impossible_number_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.of({key: value})
    said = str(refused.value)
    assert said.startswith(f"{key}: ")
    assert repr(value) in said
    assert "\n" not in said


@pytest.mark.integration
def test_when_every_record_is_bad_the_first_is_named(topics: Topics, name: str, tmp_path: Path) -> None:
    from framework import Fields
    from framework.transactions.run import TopologyFailed

    topics.send(topics.create(name), [b"{"] * 500)
    runs = KafkaRuns(topics, tmp_path, name, codec=JsonCodec(Fields(value=str)))
    with pytest.raises(TopologyFailed, match=f"topic '{name}', partition 0, offset 0|{name}/0.* offset 0") as stopped:
        runs.catch_up()
    assert "\n" not in str(stopped.value)


@pytest.mark.integration
def test_a_record_without_a_timestamp_is_read(topics: Topics, name: str, tmp_path: Path) -> None:
    topics.create(name)
    producer = topics.producer()
    producer.produce(name, b"old", timestamp=-1)
    producer.produce(name, b"new")
    producer.arrived()
    runs = KafkaRuns(topics, tmp_path, name, codec=TextCodec())
    runs.catch_up()
    assert runs.counts() == {"old": 1, "new": 1}
    assert isinstance(runs.spout(), OpaqueKafkaTransactionalSpout)
