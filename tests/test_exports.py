"""What the packages export, and that importing them stays light."""

import importlib
import subprocess
import sys
import tomllib

import pytest

from tests.kit.processes import ROOT

PUBLIC = {
    "framework": {
        *("Fields", "Tuple", "TransactionAttempt", "FailedException", "BaseBasicBolt", "BaseBatchBolt"),
        *("BaseTransactionalBolt", "Committer", "ArrowBolt", "TransactionalTopologyBuilder", "submit", "Config"),
        *(
            "PartitionedTransactionalSpout",
            "OpaquePartitionedTransactionalSpout",
            "PartitionPlanner",
            "PartitionReader",
        ),
    },
    "framework.transactions": {"TransactionalState", "RotatingTransactionalState", "MemoryStore", "ZooKeeperStore"},
    "spouts": {
        *("MemoryTransactionalSpout", "OpaqueMemoryTransactionalSpout"),
        *("KafkaTransactionalSpout", "OpaqueKafkaTransactionalSpout", "JsonCodec", "TextCodec", "BytesCodec"),
    },
    "sinks": {
        *("NonTransactionalMapState", "TransactionalMapState", "OpaqueMapState", "MemoryBackend", "SqliteBackend"),
        *("TransactionalValue", "OpaqueValue", "Count", "Sum", "Min", "Max", "StateCommitter"),
    },
    "framework.testing": {"Outside", "SimulationFailed", "run_core_on", "run_on", "simulate"},
    "integration": {"EmbeddedServers", "KafkaBroker", "ZooKeeperServer", "ServerError"},
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_exported_and_all_of_them_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert PUBLIC[package] <= set(module.__all__)
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_packages_loads_neither_spark_nor_pandas() -> None:
    code = "import sys, framework, spouts, sinks; print({'pyspark', 'pandas', 'pyarrow.dataset'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("package", ["framework", "integration", "ratchet", "sinks", "spouts"])
def test_type_checkers_take_the_types_of_an_installed_package(package: str) -> None:
    """They look for the marker of PEP 561, which goes into the wheel."""
    assert (ROOT / package / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"][package]
