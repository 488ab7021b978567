"""Networks on which the Hub is hard to reach: proxies, certificates, addresses of no use."""

import errno
import os
import shutil
import socket
import subprocess

import pytest

from gpt_cli import hub as product
from gpt_cli.hub import connection, network
from support.in_process import refusal
from support.loopback_hub import LoopbackHub, model_files, use_hub
from support.processes import COMMAND

REPO = "acme/gpt"
WEIGHTS = os.urandom(300_000)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in (*PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(hub):
    """Return a Hub whose weights are in its storage."""
    hub.add(REPO, model_files(**{"model.safetensors": WEIGHTS}))
    hub.xet = True
    return hub


def download(**env):
    """Run `gpt-cli download` as a process, which reads variables as it starts; return its notes."""
    done = subprocess.run(
        [*COMMAND, "download", REPO], env=os.environ | env, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        folder = product.Path(done.stdout.strip())
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    return done.returncode, done.stderr.splitlines()


# --- proxies ---


def test_a_proxy_that_allows_one_host_brings_the_model(hub):
    hub.allowed, hub.cdn, hub.storage = {"hub.invalid"}, "hub.invalid", "http://storage.invalid"
    env = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint, "NO_PROXY": ""}
    code, (_, note, last) = download(**env)
    assert code == 0
    assert note.startswith("gpt-cli: the storage storage.invalid answers 403: fetching acme/gpt")
    assert last.startswith("gpt-cli: acme/gpt: 300 kB in ")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_asks_for_a_password_is_told(hub, scheme):
    hub.fail("407")
    variable = f"{scheme.upper()}_PROXY"
    env = {"HF_ENDPOINT": f"{scheme}://hub.invalid", variable: hub.endpoint, "NO_PROXY": ""}
    code, (line,) = download(**env)
    assert code == 3
    assert "the proxy asks for a name and a password (407): put them into the variable" in line


def test_a_proxy_that_is_dead_is_named(hub):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, (line,) = download(HTTP_PROXY=f"127.0.0.1:{port}", NO_PROXY="")
    assert code == 3
    assert f"127.0.0.1:{port}, the proxy of HTTP_PROXY, cannot be reached (Connection ref" in line
    assert hub.requests == []


# --- certificates ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return files: of a certificate for this machine with its key, and of who has signed it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificate")
    key = "ec -pkeyopt ec_paramgen_curve:prime256v1"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=CA:FALSE"
    for command in (
        f"req -x509 -newkey {key} -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        f"req -newkey {key} -nodes -subj /CN=localhost {names} -keyout key -out request",
        "x509 -req -in request -CA ca.pem -CAkey ca.key -days 2 -copy_extensions copy -out pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "pem").read_text() + (folder / "key").read_text())
    return both, folder / "ca.pem"


@pytest.fixture
def safe_hub(certificate, tmp_path, cache, monkeypatch):
    """Yield a Hub that speaks HTTPS."""
    with LoopbackHub(tmp_path / "safe", certificate[0]) as server:
        server.add(REPO, model_files(**{"model.safetensors": WEIGHTS}))
        use_hub(server.endpoint, cache, monkeypatch)
        yield server


@pytest.mark.parametrize("xet", [False, True])
def test_a_certificate_must_be_trusted(safe_hub, certificate, xet):
    safe_hub.xet = xet
    if not xet:
        code, (line,) = download()
        assert code == 3
        says = f"the certificate of {safe_hub.endpoint} is not trusted: set SSL_CERT_FILE to"
        assert says in line
    code, lines = download(SSL_CERT_FILE=str(certificate[1]))
    assert code == 0, lines
    assert any("/xorb/" in request.path for request in safe_hub.requests) == xet


@pytest.mark.parametrize("xet", [False, True])
def test_both_protocols_go_through_a_proxy(safe_hub, hub, certificate, xet, monkeypatch):
    safe_hub.xet = xet
    env = {"HTTPS_PROXY": hub.endpoint, "NO_PROXY": "", "SSL_CERT_FILE": str(certificate[1])}
    code, lines = download(HF_ENDPOINT=safe_hub.endpoint, **env)
    assert code == 0, lines
    targets = {request.path for request in hub.requests if request.method == "CONNECT"}
    assert targets == {f"127.0.0.1:{safe_hub.port}", f"localhost:{safe_hub.port}"}


# --- addresses ---


def test_a_server_is_reached_at_the_address_that_works(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = server.getsockname()[1]
    real = socket.getaddrinfo

    def both(host, port, *args, **options):
        works = real("127.0.0.1", port, *args, **options)
        leads_nowhere = [(*entry[:4], ("127.0.0.1", dead)) for entry in works]
        return leads_nowhere + works

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr(connection, "_CONNECTION", 0.3)
    network.reach(f"http://hub.invalid:{hub.port}", 2)
    assert (product.resolve(REPO) / "config.json").is_file()


def test_a_route_that_swallows_packets_is_given_up(monkeypatch):
    with socket.socket() as full:  # no room for another connection
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        with pytest.raises(network.UnreachableError, match="does not answer"):
            network.reach(f"http://127.0.0.1:{address[1]}", 0.3)
        for one in waiting:
            one.close()


def test_an_address_without_a_route_is_told(hub, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.ENETUNREACH)
    with pytest.raises(network.UnreachableError, match="Network is unreachable"):
        network.reach(hub.endpoint, 1)


def test_a_host_may_be_excepted_from_the_proxy_with_its_port(hub):
    code, _ = download(HTTP_PROXY="http://127.0.0.1:1", NO_PROXY=f"127.0.0.1:{hub.port},localhost")
    assert code == 0


@pytest.mark.parametrize("proxy", ["http://proxy:port", "http://[::1"])
def test_a_proxy_that_is_no_address_is_told(hub, proxy):
    code, (line,) = download(HTTP_PROXY=proxy, NO_PROXY="")
    assert code == 2
    assert "check the environment variables HF_*, SSL_* and *_PROXY" in line


def test_a_password_in_the_address_of_the_hub_is_not_shown(hub):
    endpoint = hub.endpoint.replace("//", "//user:secret@").replace(str(hub.port), "1")
    code, lines = download(HF_ENDPOINT=endpoint)
    assert code == 3
    assert "secret" not in "".join(lines)


# --- answers that are not a Hub's, and settings that cannot be right ---


@pytest.mark.parametrize("answer", ["html", "{}"])
def test_what_does_not_answer_like_a_hub_is_told(hub, answer):
    hub.fail(answer)
    message = refusal("download", REPO, code=3)
    assert f"{hub.endpoint} does not answer like a Hub: check HF_ENDPOINT and the proxy" in message


def test_a_token_that_cannot_be_sent_is_told(hub):
    code, (line,) = download(HF_TOKEN="\N{LEFT DOUBLE QUOTATION MARK}hf_abc")
    assert code == 3
    assert "the token for the Hub has a character that no token has: set HF_TOKEN" in line


@pytest.mark.parametrize("page", ["tree/v1", "blob/refs%2Fpr%2F7/config.json"])
def test_the_address_of_a_revision_is_refused(hub, page):
    message = refusal("download", f"https://hf.co/{REPO}/{page}", code=3)
    revision = "v1" if "v1" in page else "refs/pr/7"
    assert f"is the page of a revision: give {REPO}, and --revision {revision}" in message


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "/blob/main/config.json", "?a=b#c"])
@pytest.mark.parametrize("host", ["https://huggingface.co", "huggingface.co", "https://hf.co", ""])
def test_the_address_of_a_page_is_the_name_of_its_model(hub, host, rest, caplog):
    host = host or hub.endpoint
    assert (product.resolve(f"{host}/{REPO}{rest}") / "config.json").is_file()
    assert f"taking {REPO} from its address" in caplog.messages
    caplog.clear()
    product.resolve(f"{host}/{REPO}{rest}", offline=True)


@pytest.mark.parametrize(
    "name", ["https://example.com/acme/gpt", "https://huggingface.co/datasets/a/b", "https://hf.co"]
)
def test_other_addresses_are_no_models(hub, name):
    assert "give a folder, OWNER/NAME on the Hub" in refusal("download", name, code=3)
    assert hub.requests == []


def test_a_cache_without_references_names_what_it_has(hub, cache):
    folder = product.resolve(REPO)
    shutil.rmtree(cache / "models--acme--gpt" / "refs")
    message = refusal("generate", "-m", REPO, "--offline", "Once", code=3)
    assert f"the cache has {REPO}, but not what main is: add --revision {folder.name}" in message
    assert product.resolve(REPO, revision=folder.name, offline=True) == folder
