"""The server's process and its signals; uvicorn speaks HTTP."""

import asyncio
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt_cli.options.declare import OptionError
from gpt_cli.serve.front import systemd
from gpt_cli.serve.front.keys import Keys
from gpt_cli.serve.front.log import write_event
from gpt_cli.serve.front.proxies import UNIX
from gpt_cli.serve.front.sockets import Listener, bind
from gpt_cli.serve.settings import Settings
from gpt_cli.system.signals import ENDING, HANGUP, raise_swallowed

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.serve.responses import Service

IDLE_SECONDS = 60.0  # for a client to send a request, or to read more of an answer
LAST_SECONDS = 5.0  # for requests to end after the grace
LINGER_SECONDS = 2.0  # at the end, for a client to send the request that it has connected for
MOST_CONNECTIONS = 500  # or half of the files that this process may open
_logger = logging.getLogger("gpt_cli")
_AT_ONCE = 16  # connections that are accepted before the first of them is read
_CLOSE = (b"connection", b"close")
_HEADERS_SIZE = 1 << 16  # bytes; a browser sends the cookies of all servers of this machine


def run(
    engine: "Engine | Mapping[str, Engine] | Callable[[], Engine | Mapping[str, Engine]]",
    settings: Settings | None = None,
    ready: Callable[[str], None] = lambda address: None,
    waiting: Callable[[int], None] = lambda requests: None,
    cut_off: Callable[[int], None] = lambda requests: None,
    reloaded: Callable[[int], None] = lambda keys: None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then stop listening, and finish what has come.

    Requests have `settings.grace` seconds for that. If a supervisor such as systemd has opened a
    socket (`LISTEN_FDS`), listen on that one, and leave connections that wait there to the next
    server.

    Args:
        engine: the loaded model, or several by their names for clients, or a function that loads
            them once the address is known to be free. A request without a model gets the first.
        settings: of the server, by default `Settings()`.
        ready: called with the address, such as http://127.0.0.1:8000, when the server answers.
        waiting: called after a signal with the number of requests that run, if any.
        cut_off: called after the grace with the number of requests that are not finished, if any.
        reloaded: called with the number of keys once SIGHUP has read `settings.api_key_file` again.
    """
    settings = settings or Settings()
    keys = Keys(settings.api_key, settings.api_key_file)
    has_log = settings.access_log

    def report(event: str, **fields: Any) -> None:
        if has_log:
            write_event(event, **fields)
        match event, *fields.values():
            case "listening", address:
                ready(address)
            case "draining", requests if requests:
                waiting(requests)
            case "cut_off", requests:
                cut_off(requests)
            case "keys", number:
                reloaded(number)

    def reload() -> None:
        try:
            report("keys", keys=keys.reload())
        except OptionError as error:
            complaint = error.args[-1]
            _logger.error("--api-key-file %s; the keys are as before", complaint)

    has_file = settings.api_key_file is not None
    with _hangup_ignored() if has_file else nullcontext(), bind(settings) as listener:
        settings = listener.described(settings)
        loaded = engine() if callable(engine) else engine
        from gpt_cli.serve.app import application  # NumPy, which `engine` prepares

        app, service = application(loaded, settings, keys)
        try:
            raise_swallowed()  # while numpy.random was imported
            running = Server(app, settings.grace, service, report, reload if has_file else None)
            running.serve_on(listener)
        finally:
            service.stop()
            service.join()
        report("stopped")


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    """Ignore SIGHUP while a model is loaded: `Server` handles it, but not before it serves."""
    if HANGUP is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(HANGUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(HANGUP, earlier)


class Server(uvicorn.Server):
    """uvicorn's server; it closes idle connections, and loses no request at the end.

    At the first SIGTERM, SIGINT or SIGHUP, it stops listening: another server may have the port.
    It still answers the requests of clients that have connected, also one more of each client that
    keeps its connection open; their answers say that this was the last. Once all connections are
    closed, or after `grace` seconds, the service stops. A second signal ends the process at once,
    by the earlier handlers. At the end, the earlier handler of SIGHUP gets a first SIGHUP, too.
    With `reload`, SIGHUP calls this function and ends nothing. `report` is called with each event,
    as `write_event` is.
    """

    def __init__(
        self,
        app: ASGIApp,
        grace: float,
        service: "Service",
        report: Callable[..., None],
        reload: Callable[[], None] | None = None,
    ):
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(_Connection, report)),
            ws="none",
            lifespan="off",
            workers=1,
            log_config=None,
            log_level="critical",  # it writes none of these
            backlog=_AT_ONCE,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            h11_max_incomplete_event_size=_HEADERS_SIZE,
        )
        super().__init__(config)
        self._grace = grace
        self._service = service
        self._report = report
        self._reload = reload
        self._signals: list[int] = []

    def serve_on(self, listener: Listener) -> None:
        """Serve until `should_exit` is set or a signal comes."""
        self._listener = listener
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients that leave
        with suppress(asyncio.CancelledError), asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_complain)
            self._serving = self._loop.create_task(self.serve([listener.socket.dup()]))
            self._loop.run_until_complete(self._serving)
        if len(self._signals) > 1 or HANGUP in self._signals:
            signal.raise_signal(self._signals[-1])  # for the earlier handlers

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle all signals that end the program, except ignored ones, as SIGHUP under nohup."""
        earlier: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            earlier = {number: signal.getsignal(number) for number in ENDING}
        handled = {
            number: handler
            for number, handler in earlier.items()
            if handler is not signal.SIG_IGN or (number == HANGUP and self._reload)
        }
        for number in handled:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in handled.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and call `ready`."""
        await super().startup(sockets)
        await anyio.sleep(0)  # imports its backend; later, too many files may be open for that
        self._report("listening", address=self._listener.address)
        systemd.notify("READY=1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and end at the second; reload at SIGHUP, if that is wanted."""
        if sig == HANGUP and self._reload:
            self._loop.call_soon_threadsafe(self._reload)
            return
        self._signals.append(sig)
        if self.should_exit:
            # Not an exception: this may run within a request, and uvicorn would catch it.
            self._loop.call_soon_threadsafe(self._kill)
        self.should_exit = True

    def _kill(self) -> None:
        """End at once, and drop the requests that run."""
        if not self._serving.cancelling():
            self._report("killed", requests=self._running())
            self._serving.cancel()

    async def on_tick(self, counter: int) -> bool:
        """End connections whose clients sleep; return whether to end."""
        for connection in self._connections:  # ten times a second
            connection.end_if_asleep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and answer what has come until the grace ends; then stop the rest."""
        systemd.notify("STOPPING=1")
        end = self._loop.time() + self._grace
        for listening in sockets or []:
            await self._stop_listening(listening)
        self._report("draining", requests=self._running())
        while self._connections and self._loop.time() < end:
            await asyncio.sleep(0.1)
            await self.on_tick(0)
            for connection in self._connections:
                connection.end_if_done(time.monotonic())
        running = self._running()
        if running:
            self._report("cut_off", requests=running)
        self._service.stop()
        self.config.timeout_graceful_shutdown = int(LAST_SECONDS)
        await super().shutdown(sockets)

    async def _stop_listening(self, listening: socket.socket) -> None:
        """Close the port, and let each connection have one last answer."""
        with suppress(NotImplementedError):  # on Windows
            self._loop.remove_reader(listening)
        await asyncio.sleep(0)  # asyncio begins with the connections that it has accepted
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append(_CLOSE)
        await self.on_tick(0)  # makes the headers of later answers
        for connection in self._connections:
            connection.announce_end()
        for waiting in self._listener.end():
            with suppress(OSError):  # it has left
                await self._loop.connect_accepted_socket(self._connection, waiting)

    def _connection(self) -> "_Connection":
        return _Connection(self._report, self.config, self.server_state, self.lifespan.state)

    @property
    def _connections(self) -> "list[_Connection]":
        return cast("list[_Connection]", list(self.server_state.connections))

    def _running(self) -> int:
        """Return the number of requests that are being answered."""
        return sum(connection.running for connection in self._connections)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end, and close all connections."""
        try:
            await super().serve(sockets)
        finally:
            for listening in sockets or []:
                listening.close()
            for connection in self._connections:
                connection.transport.abort()


class _Connection(H11Protocol):
    """uvicorn's connection, with a limit to the time that it waits for its client."""

    _state: tuple[Any, ...] = ()
    _since = 0.0

    def __init__(self, report: Callable[..., None], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._report = report

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that h11 cannot read, and report them."""
        message = "not HTTP, such as TLS, or a head that is too long: answered with status 400"
        self._report("warning", message=message, client=self.client[0] if self.client else UNIX)
        super().send_400_response(msg)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        if len(self.connections) > _most_connections():
            transport.abort()

    @property
    def running(self) -> bool:
        """Return whether a request is answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def end_if_asleep(self, now: float) -> None:
        """End the connection if the client neither reads an answer nor sends a whole request."""
        unsent = self.transport.get_write_buffer_size()
        state = (unsent, self.cycle, self.running)
        if state != self._state:
            self._state = state
            self._since = now
        elif (unsent or not self.running) and now - self._since >= IDLE_SECONDS:
            self.transport.abort()

    def announce_end(self) -> None:
        """Let the answer that is computed say that the connection ends with it.

        If it has begun already, its client may send another request.
        """
        if self.running and not self.cycle.response_started:
            self.cycle.default_headers = self.server_state.default_headers

    def end_if_done(self, now: float) -> None:
        """End the connection if its client had time for another request, and has sent none."""
        is_read = not self.transport.get_write_buffer_size()
        if is_read and not self.running and now - self._since >= LINGER_SECONDS:
            self.transport.close()


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error outside of requests, unless no more files can be opened."""
    # In that case, the loop accepts connections again a second later.
    if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
        loop.default_exception_handler(context)


def _most_connections() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    return MOST_CONNECTIONS if unlimited else min(MOST_CONNECTIONS, files // 2)
