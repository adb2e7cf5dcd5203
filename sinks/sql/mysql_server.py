"""Queries to a MariaDB or MySQL server about itself, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pymysql

from framework.errors import BadRecordError, ConfigError, CorruptStateError, RetryableError

MARIADB_MIN, MYSQL_MIN = (10, 6), (8, 0, 17)
#: A write to a read-only server. At the start it is refused; later it means that another server is
#: becoming the primary.
READ_ONLY = (1290, 1792, 1836)
#: Transient errors, including lack of space: locks and deadlocks, connections, resources, restarts,
#: the disk, and a table that another client has just created or altered.
_PASSING = (
    *(1205, 1213, 1614, 1689, 3572),
    *(1040, 1041, 1042, 1053, 1077, 1078, 1079, 1080, 1129, 1135, 1152, 1158, 1159, 1160, 1161, 1184, 1203),
    *(1226, 1317, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 3024, 1969, 4031, 4170),
    *(1015, 1021, 1023, 1026, 1030, 1037, 1038, 1114, 1180, 1181, 1637, 1050, 1412, 1615),
    *READ_ONLY,
)
#: Errors of values that the table will never accept.
_VALUES = (
    *(1048, 1062, 1216, 1217, 1264, 1265, 1292, 1364, 1365, 1366, 1367, 1406, 1411, 1416, 1441, 1451, 1452, 1525),
    *(1586, 1690, 1761, 3140, 3819, 4025, 4161, 1071, 1118, 1153, 1301, 3854, 1067, 1070, 1101, 1117, 4026),
)
#: Errors of unique values and of foreign keys.
_OF_OTHER_ROWS = (1062, 1216, 1217, 1451, 1452, 1586, 1761)
#: Errors of an address, a user or its permissions.
_REFUSALS = (1044, 1045, 1049, 1130, 1142, 1143, 1227, 1251, 1370, 1396, 1410, 1698, 2026, 2054, 2059, 2061, 3118, 4151)
_CORRUPT = (1034, 1035, 1194, 1195, 1712, 1877)


def named(error: Exception, location: str) -> Exception:
    """Convert the database's error to Ratchet's error class by recovery."""
    code, text = code_of(error), f"{location}: {line_of(error)}"
    if code in _PASSING or isinstance(error, (pymysql.err.InterfaceError, OSError)):
        return RetryableError(text)
    if code in _VALUES or isinstance(error, (pymysql.err.DataError, UnicodeError)):
        return BadRecordError(f"{text}; this value cannot be stored as it is")
    if code in _REFUSALS:
        return ConfigError(f"{text}; check the address, the user, the password and its rights")
    if code in _CORRUPT:
        return CorruptStateError(f"{text}; restore the database from a backup")
    return ConfigError(f"{text}; this does not pass by itself: look at the database, then run the topology again")


def is_of_row_alone(error: BaseException) -> bool:
    """Whether an error refuses a row independently of other rows."""
    return code_of(error) in _VALUES and code_of(error) not in _OF_OTHER_ROWS


def code_of(error: BaseException) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


def line_of(error: BaseException) -> str:
    text = " ".join(str(each) for each in error.args[1:]) or str(error) or type(error).__name__
    code = code_of(error)
    return (f"{text.strip()} ({code})" if code else text.strip()).split("\n")[0]


def identity(connection: Any) -> str:
    """A SQL expression for the identity of the store: the server and its start time. It changes
    when another server replaces it, and after a restart, which may have used a copy of the files.
    """
    schema, own = ("information_schema", "''") if connection.is_mariadb else ("performance_schema", "@@server_uuid")
    started = f"UNIX_TIMESTAMP() - (SELECT variable_value FROM {schema}.global_status WHERE variable_name = 'Uptime')"
    return f"CONCAT_WS('/', @@hostname, @@port, @@server_id, @@datadir, {own}, {started})"


def setting(connection: Any, name: str) -> str:
    """A setting of the server; empty if it does not exist."""
    found = connection.execute("SHOW GLOBAL VARIABLES LIKE %s", (name.replace("_", r"\_"),)).fetchone()
    return str(found[1]).upper() if found is not None else ""


def unfit(connection: Any) -> str:
    """Why a run cannot write to this server, with the remedy; empty if it can."""
    least = MARIADB_MIN if connection.is_mariadb else MYSQL_MIN
    if connection.version < least:
        product = "MariaDB" if connection.is_mariadb else "MySQL"
        return f"the server is {product} {'.'.join(map(str, connection.version))}: {'.'.join(map(str, least))} or newer is needed"
    if "ON" in (setting(connection, "read_only"), setting(connection, "super_read_only")) or (
        setting(connection, "innodb_read_only") == "ON"
    ):
        return "the server is read-only; give the address of the primary"
    if setting(connection, "log_bin") == "ON" and setting(connection, "binlog_format") == "STATEMENT":
        return "binlog_format is STATEMENT, with which READ COMMITTED cannot write; set it to ROW or MIXED"
    if setting(connection, "wsrep_on") == "ON" and setting(connection, "wsrep_provider") not in ("", "NONE"):
        return (
            "the server belongs to a Galera cluster, whose nodes do not see each other's locks, so that a dead writer could "
            "write by another node; use a server with replicas"
        )
    if setting(connection, "group_replication_single_primary_mode") == "OFF":
        return "the group has several primaries, which do not see each other's locks; use a single primary"
    return ""


def losses(connection: Any) -> Iterator[tuple[str, str]]:
    """The ways in which the server can lose committed data, with their remedies."""
    flushed = setting(connection, "innodb_flush_log_at_trx_commit")
    if flushed not in ("1", "3"):
        yield f"innodb_flush_log_at_trx_commit is {flushed}", "set innodb_flush_log_at_trx_commit = 1"
    if setting(connection, "innodb_doublewrite") in ("OFF", "DETECT_ONLY", "0"):
        yield "innodb_doublewrite is off", "set innodb_doublewrite = ON, unless the file system writes whole pages"
    if setting(connection, "log_bin") != "ON":
        return
    synced = setting(connection, "sync_binlog")
    if synced != "1":
        yield f"sync_binlog is {synced}", "set sync_binlog = 1"
    query = "SHOW GLOBAL STATUS LIKE 'Slaves\\_connected'"
    found = connection.execute(query).fetchone()
    semi = (setting(connection, "rpl_semi_sync_master_enabled"), setting(connection, "rpl_semi_sync_source_enabled"))
    if found is not None and int(found[1]) and "ON" not in semi:
        yield (
            f"{found[1]} replicas may follow later than a commit is acknowledged",
            "use semi-synchronous replication with rpl_semi_sync_master_wait_point = AFTER_SYNC",
        )
