"""Calls of a function that the user has written: a plain one in turn, an ``async def`` many times
together.

Invariants:

1. Results are in the order of the arguments.
2. ``setup`` is called once per process. Its result is the last argument of each call.
3. The first call that fails, after its retries, ends the others.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any, TypeVar

from cachetools import LRUCache

from framework.call_site import Call
from framework.durations import Duration, micros_above_0
from framework.errors import BadRecordError, ConfigError, RetryableError, TopologyError, reason_of

T = TypeVar("T")
#: Of an ``async def``, where the user says nothing: calls at a time, and how long one may take.
CONCURRENCY, TIMEOUT = 32, "30 s"
#: The pause before the second try, doubled before each further one, up to the second number.
_DELAY_S, _DELAY_MAX_S = 0.1, 10.0
#: How often a waiting task looks whether its attempt was cancelled.
_LOOK_S = 0.2
#: Errors that another try does not change.
_LASTING = (BadRecordError, ConfigError, TopologyError)
#: The results of ``setup=`` in this process. Models are large.
_setups: LRUCache[str, Any] = LRUCache(maxsize=16)
_setups_lock = threading.RLock()
#: Raises where the attempt was cancelled, for which this thread computes.
check_alive: ContextVar[Callable[[], None]] = ContextVar("check_alive", default=lambda: None)


def _nothing(result: Any) -> None:
    """Accept each result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """How a function is called. ``timeout_s``: of one call of an ``async def``. ``retries``: how
    often a call that failed is made again. ``key`` tells functions apart that are in one
    process."""

    call: Call
    function: Callable[..., Any]
    setup: Callable[[], Any] | None = None
    concurrency: int = 1
    timeout_s: float | None = None
    retries: int = 0
    key: str = field(default="", compare=False)
    #: The calls of this batch and task that failed and were repeated, as the names of their errors.
    failed: list[str] = field(default_factory=list, compare=False)

    @property
    def is_async(self) -> bool:
        """Whether the function is an ``async def``."""
        return is_async(self.function)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions of the user."""
        return [self.function, *([self.setup] if self.setup is not None else [])]

    def results(self, arguments: Iterable[Any], check: Callable[[Any], None] = _nothing) -> list[Any]:
        """The results of ``each``."""
        return list(self.each(arguments, check))

    def each(self, arguments: Iterable[Any], check: Callable[[Any], None] = _nothing) -> Iterable[Any]:
        """The result of the function for each argument. A plain function is called when its result
        is requested. ``check`` gets each result before the next call begins; an error of ``check``
        ends the calls.

        After the last try, raises ``RetryableError`` for a timeout or a failed connection,
        otherwise the error of the function. A ``BadRecordError`` is not tried again."""
        more = () if self.setup is None else (self._made(self.setup),)
        if self.is_async:
            return _awaited(self._together(arguments, more, check))
        return (self._tried(argument, more, check) for argument in arguments)

    def _tried(self, argument: Any, more: tuple[Any, ...], check: Callable[[Any], None]) -> Any:
        tries = 0
        while True:
            try:
                result = self.function(argument, *more)
                break
            except Exception as error:  # noqa: BLE001 - code of the user
                tries += 1
                pause_s = self._pause_after(tries, error)
            _wait(pause_s)
        if isinstance(result, CoroutineType):
            result.close()
            raise self.call.mistake("the function returned a coroutine: give the async def itself")
        check(result)
        return result

    async def _together(
        self, arguments: Iterable[Any], more: tuple[Any, ...], check: Callable[[Any], None]
    ) -> list[Any]:
        results: list[Any] = []
        waiting = iter(arguments)

        async def work() -> None:
            for argument in waiting:
                place = len(results)
                results.append(None)
                results[place] = await self._tried_async(argument, more)
                check(results[place])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return results

    async def _tried_async(self, argument: Any, more: tuple[Any, ...]) -> Any:
        tries = 0
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self.function(argument, *more)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise RuntimeError(f"{self.call}: the function cancelled itself") from error
            except SystemExit as error:  # it would end the loop, and with it the calls of other steps
                raise RuntimeError(f"{self.call}: the function called sys.exit({error.code!r})") from error
            except Exception as error:  # noqa: BLE001 - code of the user
                tries += 1
                pause_s = self._pause_after(tries, error)
            await asyncio.sleep(pause_s)

    def _pause_after(self, tries: int, error: Exception) -> float:
        """Seconds until the next try. Raises where there is none."""
        if tries <= self.retries and not isinstance(error, _LASTING):
            self.failed.append(type(error).__name__)
            return min(_DELAY_S * 2.0 ** (tries - 1), _DELAY_MAX_S)
        if not isinstance(error, (TimeoutError, ConnectionError)):
            raise error
        said = reason_of(str(error)) or "no answer in time"
        raise RetryableError(
            f"{self.call}: {type(error).__name__}, {tries} of {self.retries + 1} tries: {said}"
        ) from error

    def _made(self, setup: Callable[[], Any]) -> Any:
        with _setups_lock:
            if self.key not in _setups:
                _setups[self.key] = _awaited(_called(setup)) if self.is_async else setup()
            return _setups[self.key]


def calls_of(
    call: Call,
    function: Callable[..., Any],
    key: str,
    *,
    setup: Callable[[], Any] | None,
    concurrency: int | None,
    timeout: Duration | None,
    retries: int,
) -> Calls:
    """The calls, with the defaults of an ``async def``. Raises ``TopologyError`` for what does not
    fit the function."""
    if setup is not None and not callable(setup):
        raise call.mistake(f"setup is {setup!r}: give a function, which is called once per process")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise call.mistake(f"retries is {retries!r}: give a number of 0 or more")
    if inspect.isasyncgenfunction(function):
        raise call.mistake("an async def that yields is not taken: return a list")
    if not is_async(function):
        if concurrency is not None or timeout is not None:
            raise call.mistake(
                f"{'concurrency' if concurrency is not None else 'timeout'} is for an async def: a plain function is called "
                "once at a time, and nothing can stop it"
            )
        if is_async(setup):
            raise call.mistake("setup is an async def, and the function is not: make both one, or neither")
        return Calls(call=call, function=function, setup=setup, retries=retries, key=key)
    concurrency = CONCURRENCY if concurrency is None else concurrency
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise call.mistake(f"concurrency is {concurrency!r}: give a number of 1 or more")
    try:
        timeout_s = micros_above_0(TIMEOUT if timeout is None else timeout, "timeout") / 1_000_000
    except ConfigError as error:
        raise call.mistake(error) from None
    return Calls(
        call=call,
        function=function,
        setup=setup,
        concurrency=concurrency,
        timeout_s=timeout_s,
        retries=retries,
        key=key,
    )


def is_async(function: object) -> bool:
    """Whether a call of it must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _called(setup: Callable[[], Any]) -> Any:
    """Called where the function runs: a client belongs to the loop that it was made in."""
    made = setup()
    return await made if inspect.isawaitable(made) else made


def _wait(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        check_alive.get()()
        time.sleep(min(left, _LOOK_S))


def _awaited(work: Coroutine[Any, Any, T]) -> T:
    """Run it in the loop of this process, and cancel it with the attempt."""
    future = asyncio.run_coroutine_threadsafe(work, _Loop.of_this_process().loop)
    try:
        while not concurrent.futures.wait([future], _LOOK_S).done:
            check_alive.get()()
    except BaseException:
        future.cancel()
        raise
    return future.result()


class _Loop:
    """A loop in a thread of its own. A resource that ``setup`` opens in it, such as a pool of
    connections, lasts as long as the process."""

    _current: _Loop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.process = os.getpid()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ratchet-async-functions", daemon=True)
        self._thread.start()
        self._ready.wait()
        atexit.register(self._stop)

    @classmethod
    def of_this_process(cls) -> _Loop:
        """A forked process has not the thread of the one that it was made from."""
        with cls._lock:
            if cls._current is None or cls._current.process != os.getpid():
                cls._current = cls()
            return cls._current

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # at its end it cancels what is under way
            self.loop = runner.get_loop()
            self._stopped = asyncio.Event()
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._ready.set()
        await self._stopped.wait()

    def _stop(self) -> None:
        if self.process == os.getpid():
            self.loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout=5)
