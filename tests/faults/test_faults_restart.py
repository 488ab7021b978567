"""Faults around a server that restarts, its keys and its proxies: no client may notice a restart.

systemd is a process here that holds the socket and starts one server after the other. nginx is
nginx, with the configuration of docs/service.md.
"""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from support.processes import COMMAND, LIMIT, LimitedProcess, posix
from support.server_process import COMPLETIONS, Server, answer_on
from support.service_page import shown_files

pytestmark = posix

SLOW = pytest.mark.slow
TINY = ("serve", "-m", "tiny")
CLIENTS = 50
SHORT = {"prompt": "Once", "max_tokens": 4, "seed": 1}
KEYS = "sesame-ann ann\nsesame-bob bob\n"


def fault(name, code, intact):
    return pytest.mark.fault(82, name, code, intact=intact)


class Logged(Server):
    """A server with an access log, of which a thread reads the events."""

    def __init__(self, world, *flags, before=(), **options):
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "limit": 5 * LIMIT}
        command = [*before, *COMMAND, *TINY, "--access-log", *map(str, flags)]
        process = LimitedProcess(command, env=world.env, cwd=world.place, **pipes, **options)
        super().__init__(process, "")
        self.events = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            if line.startswith((b"Listening on", b"Communication", b"Execing")):
                continue  # of systemd-socket-activate
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == "listening":
                self.address = self.events[-1]["address"]

    def named(self, event):
        return [line for line in self.events if line["event"] == event]

    def wait_for_event(self, event, count=1):
        """Wait until an event was logged so often; return the last one."""
        end = time.monotonic() + LIMIT
        while len(self.named(event)) < count:
            assert self._reader.is_alive(), self.events
            assert time.monotonic() < end, self.events
            time.sleep(0.01)
        return self.named(event)[-1]

    @property
    def answered(self):
        """The number of completions."""
        requests = self.named("request")
        return sum((line["path"], line["status"]) == (COMPLETIONS, 200) for line in requests)

    def end(self, number=signal.SIGTERM):
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self):
        code = self.process.wait(LIMIT)
        self._reader.join()
        self.process.stderr.close()
        self.process.guard.cancel()
        return code


@pytest.fixture
def run(world):
    """Return a function that starts a server; none is left at the end."""
    with ExitStack() as stack:

        def start(*flags, **options):
            server = Logged(world, *flags, **options)
            stack.callback(lambda: (server.process.kill(), server.ended()))
            stack.callback(lambda: [connection.close() for connection in server.connections])
            return server

        yield start


def ready(server):
    server.wait_for_event("listening")
    return server


class Crowd:
    """50 clients that send requests without a pause; some keep their connections, some stream."""

    def __init__(self, connect):
        self._connect = connect  # returns a connected socket
        self.answers = 0
        self.errors = []
        self._counted = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[i]) for i in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers):
        """Wait for this number of further answers."""
        enough, end = self.answers + answers, time.monotonic() + LIMIT
        while self.answers < enough:
            assert time.monotonic() < end, (self.answers, enough, self.errors)
            time.sleep(0.05)

    def _ask(self, number):
        client = None
        body = json.dumps(SHORT | {"stream": number % 5 == 0})
        while not self._stopping.is_set():
            try:
                if client is None:
                    client = http.client.HTTPConnection("127.0.0.1", timeout=LIMIT)
                    client.sock = self._connect()
                client.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
                answer = client.getresponse()
                data = answer.read()
                assert answer.status == 200, (answer.status, data)
                assert number % 5 or data.endswith(b"data: [DONE]\n\n"), data
                if number % 2 or answer.headers["Connection"] == "close":
                    client.close()
                    client = None
                with self._counted:
                    self.answers += 1
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.errors.append(repr(error))
                client = None
        if client:
            client.close()


@contextmanager
def listening(family, path):
    """Listen as systemd does."""
    with socket.socket(family) as plain:
        plain.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(path))
        plain.listen(4096)
        yield plain


# With a descriptor, the number of sockets and a command.
ACTIVATE = """
import os, sys
descriptor, count, *command = sys.argv[1:]
os.dup2(int(descriptor), 3)
os.environ.update(LISTEN_FDS=count, LISTEN_PID=str(os.getpid()))
os.execv(command[0], command)
"""


def activated(plain, count=1):
    """Return options of a process that gets a socket as systemd hands it on."""
    descriptor = plain.fileno()
    before = [sys.executable, "-c", ACTIVATE, str(descriptor), str(count)]
    return {"before": before, "pass_fds": [descriptor]}


@SLOW
@pytest.mark.parametrize("name", ["AF_INET", "AF_UNIX"], ids=["port", "unix"])
@fault("4 restarts of a server under 50 clients, by socket activation", 0, "every request")
def test_a_restart_by_socket_activation_loses_nothing(name, run, world):
    family = getattr(socket, name)
    with listening(family, world.place / "s") as plain:

        def start():
            return run(**activated(plain))

        def connect():
            connection = socket.socket(family)
            connection.settimeout(LIMIT)
            connection.connect(plain.getsockname())
            return connection

        servers = [ready(start())]
        with Crowd(connect) as crowd:
            for overlaps in (False, True, False, True):
                crowd.wait_for(300)
                earlier = servers[-1]
                earlier.process.send_signal(signal.SIGTERM)
                if not overlaps:
                    assert earlier.ended() == 0
                servers.append(ready(start()))
                assert earlier.ended() == 0
            crowd.wait_for(300)
        assert servers[-1].end() == 0
    assert crowd.errors == []
    assert crowd.answers == sum(server.answered for server in servers)
    assert all(server.answered for server in servers)


@contextmanager
def nginx(world, ports):
    """Run nginx with the configuration of the page before these ports; yield its port."""
    port = free_port()
    site = shown_files()["gpt-cli.conf"]
    for shown, used in {"8001": ports[0], "8002": ports[1], "listen 80": f"listen {port}"}.items():
        assert shown in site
        site = site.replace(shown, str(used))
    folder = world.root / "nginx"
    folder.mkdir()
    folder.chmod(0o777)  # its workers are of another user
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{name}_temp_path {folder}/{name};\n" for name in names)
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/errors;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{site}}}\n"
    )
    command = ["nginx", "-e", str(folder / "errors"), "-c", str(configuration)]
    with LimitedProcess(command, stderr=subprocess.PIPE, limit=5 * LIMIT) as process:
        end = time.monotonic() + LIMIT
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.01)
        try:
            yield port
        finally:
            process.terminate()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@SLOW
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx")
@fault("restarts of 2 servers behind nginx under 50 clients", 0, "every request")
def test_a_restart_behind_nginx_loses_nothing(run, world):
    ports = [free_port(), free_port()]

    def start(port):
        return ready(run("--port", port, "--trusted-proxy", "127.0.0.1"))

    current = [start(port) for port in ports]
    servers = [*current]
    with nginx(world, ports) as port:

        def connect():
            return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)

        with Crowd(connect) as crowd:
            for index in (0, 1, 0, 0):
                crowd.wait_for(300)
                assert current[index].end() == 0
                current[index] = start(ports[index])
                servers.append(current[index])
            crowd.wait_for(300)
        assert [server.end() for server in current] == [0, 0]
    assert crowd.errors == []
    assert crowd.answers == sum(server.answered for server in servers)
    assert all(server.answered for server in servers)
    assert {line["client"] for line in servers[0].named("request")} == {"127.0.0.1"}


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="needs systemd")
@SLOW
@fault("a start by systemd-socket-activate", 0, "the first client")
def test_systemd_starts_it_for_the_first_client(run, world):
    port = free_port()
    names = ("HOME", "HF_HOME", "PATH")  # it hands on few variables
    passed = [f"--setenv={name}={world.env[name]}" for name in names]
    server = run(before=["systemd-socket-activate", f"--listen=127.0.0.1:{port}", *passed])
    server.address, end = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT
    while True:
        try:
            waiting = server.begin(**SHORT)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert answer_on(waiting).status == 200
    assert server.named("listening")[0]["address"] == server.address
    assert server.end() == 0


@fault("two sockets of systemd", 5, "nothing is begun")
def test_two_sockets_are_refused(suffer):
    with socket.create_server(("127.0.0.1", 0)) as plain:
        options = activated(plain, count=2)
        suffer(*TINY, **options, code=5, says="LISTEN_FDS is 2", do="give one")


@fault("--port beside a socket of systemd", 2, "nothing is begun")
def test_a_port_beside_a_socket_is_refused(suffer):
    with socket.create_server(("127.0.0.1", 0)) as plain:
        flags = (*TINY, "--port", 8001)
        suffer(*flags, **activated(plain), code=2, says="--port cannot be used", do="leave it out")


@fault("an open socket of systemd without a key", 2, "nothing is begun")
def test_an_open_socket_needs_a_key(suffer):
    with socket.create_server(("0.0.0.0", 0)) as plain:
        says, do = "other machines may reach", "set a key by GPT_CLI_API_KEY"
        suffer(*TINY, **activated(plain), code=2, says=says, do=do)


# --- keys and proxies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "says", "do"),
    [
        pytest.param(text, mode, says, do, id=name, marks=fault(name, 2, "the keys are not shown"))
        for name, text, mode, says, do in [
            ("a file of keys that others can read", KEYS, 0o644, "others can read", "chmod 600"),
            ("an empty file of keys", "", 0o600, "has no keys", "write KEY NAME"),
            ("a file of keys without names", "sesame\n", 0o600, "line 1", "must be KEY NAME"),
        ]
    ],
)
def test_a_file_of_keys_that_is_not_good_is_told(text, mode, says, do, suffer_here, world):
    path = world.root / "keys"
    path.write_text(text)
    path.chmod(mode)
    message = suffer_here(*TINY, "--api-key-file", path, code=2, says=says, do=do)
    assert "sesame" not in message


@fault("SIGHUP during a stream", 0, "the stream")
def test_a_stream_goes_on_while_the_keys_are_read(run, world):
    path = world.root / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    server = ready(run("--api-key-file", path, "--port", 0))
    (check,) = re.findall(r"test: (\[.*\])", shown_files()["compose.yaml"])
    _, _, *command = json.loads(check.replace("http://127.0.0.1:8000", server.address))
    subprocess.run([sys.executable, *command], check=True)
    server.headers = {"Authorization": "Bearer sesame-ann"}
    stream = server.begin(**SHORT | {"max_tokens": 400, "ignore_eos": True, "stream": True})
    first = stream.recv(1000)
    path.write_text("sesame-bob bob\n")
    server.process.send_signal(signal.SIGHUP)
    assert server.wait_for_event("keys")["keys"] == 1
    assert server.ask(COMPLETIONS, SHORT).error(401)["code"] == "invalid_api_key"
    received = first
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        piece = stream.recv(1 << 16)
        assert piece, received[-200:]
        received += piece
    assert server.end() == 0
    names = [(line["status"], line["key"]) for line in server.named("request")]
    assert names == [(200, None), (401, None), (200, "ann")]


@fault("a proxy, or a client of one, that lies about the client", "HTTP 200", "the log")
def test_a_lie_about_the_client_is_not_believed(run):
    for flags, forwarded, client in [
        ((), "6.6.6.6", "127.0.0.1"),
        (("--trusted-proxy", "127.0.0.1"), "6.6.6.6, 10.0.0.1", "10.0.0.1"),
        (("--trusted-proxy", "127.0.0.0/8"), '6.6.6.6, "}\\n{', "127.0.0.1"),
    ]:
        server = ready(run("--port", 0, *flags))
        assert server.ask(COMPLETIONS, SHORT, X_Forwarded_For=forwarded).status == 200
        assert server.end() == 0
        assert [line["client"] for line in server.named("request")] == [client]
