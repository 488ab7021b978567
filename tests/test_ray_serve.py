"""The server on Ray Serve answers as one process does, also while nodes and replicas die."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

import gpt_cli
from gpt_cli.errors import InputError
from gpt_cli.jobs.cluster import Model
from gpt_cli.options.declare import OptionError
from gpt_cli.serve.refusals import QueueFullError, RequestError

pytest.importorskip("ray.serve", reason="the extra ray is not installed")
pytest.importorskip("starlette", reason="the extra serve is not installed")

from ray.exceptions import ActorDiedError, RayTaskError

import gpt_cli.ray
from gpt_cli.ray import replicas
from gpt_cli.serve.answers import CompletionAnswer, EmbeddingAnswer
from gpt_cli.serve.protocol import read_completions, read_embeddings
from support.server_process import COMPLETIONS, Server, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

PORT = 8417
EMBEDDINGS = "/v1/embeddings"


def requests():
    """Return the paths and the bodies of many requests: of each kind, streamed and whole."""
    fields = [
        {},
        {"n": 3, "logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "best_of": 3, "max_tokens": 40},
        {"frequency_penalty": 1, "stop": [" moon"], "min_tokens": 5},
        {"best_of": 2, "stream": False},
        {"temperature": 0},
    ]
    if find_spec("llguidance"):
        fields.append({"guided_regex": "( [a-z]+){30,}"})
    bodies = []
    for number in range(6 * len(fields)):
        body = {"prompt": f"Once upon a time, number {number}", "max_tokens": 300, "seed": number}
        body |= {"stream": number % 2 == 0} | fields[number % len(fields)]
        bodies.append((COMPLETIONS, body))
    texts = ["The moon", "The sun rose."]
    bodies += [(EMBEDDINGS, {"input": texts, "hook": "blocks.1.hook_resid_post"})] * 2
    return bodies


def content(server, path, body):
    """Return what a request is answered: the status and all that does not depend on the time."""
    answer = server.ask(path, body)
    if answer.status != 200 or not body.get("stream"):
        return answer.status, without_time(answer.json())
    choices = {}
    for event in answer.events():
        assert "error" not in event, event
        for part in event["choices"]:
            known = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
            known["text"] += part.pop("text")
            for name, values in (part.pop("logprobs") or {}).items():
                known["logprobs"].setdefault(name, []).extend(values)
            known |= part  # the reason why it ended is in the last part
    return answer.status, choices


def without_time(answer):
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def under_load(server, what, when):
    """Return the answers to all requests of 12 clients; do something after `when` of them."""
    done = threading.Semaphore(0)

    def ask(request):
        answer = content(server, *request)
        done.release()
        return answer

    with ThreadPoolExecutor(12) as clients:
        answers = [clients.submit(ask, request) for request in requests()]
        for _ in range(when):
            assert done.acquire(timeout=120)
        server.wait_for(lambda values: values["gpt_cli_texts_running"] > 8)
        what()
        return [answer.result(timeout=120) for answer in answers]


@pytest.fixture(scope="module")
def expected():
    """The answers of `gpt-cli serve` in one process."""
    with serving() as server:
        return [content(server, *request) for request in requests()]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of three nodes on this machine, of which the head has no CPUs, with a server."""
    import ray
    from ray.cluster_utils import Cluster

    patience = {f"health_check_{name}_ms": 500 for name in ("initial_delay", "period", "timeout")}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": patience}
    )
    cluster.doomed = [cluster.add_node(num_cpus=1) for _ in range(2)][1]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    from ray import serve

    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})
    serve.run(gpt_cli.ray.server(model="tiny", replicas=2, settings={"max_queue": 8}))
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def server(cluster):
    return Server(None, f"http://127.0.0.1:{PORT}")


def replica_processes():
    """Return the ids of the processes of replicas, below the nodes of this process."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()[1:]]
    nodes = {pid for pid, parent, _ in lines if int(parent) == os.getpid()}
    ours = [line for line in lines if line[1] in nodes]
    return [int(pid) for pid, _, name in ours if ":Replica" in name and "ServeReplica" in name]


def test_requests_are_answered_and_refused_as_by_one_process(server):
    refused = [
        (COMPLETIONS, {"prompt": "a", "temperature": -1}),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "best_of": 64}),
        (COMPLETIONS, {"prompt": "Once " * 600}),
        (COMPLETIONS, {"prompt": "a", "model": "other"}),
        ("/v1/chat/completions", {}),
        (EMBEDDINGS, {"input": []}),
        ("/tokenize", {"prompt": "Once upon"}),
    ]
    with serving() as alone:
        for path, body in refused:
            assert content(server, path, body) == content(alone, path, body)
        assert server.ask("/health").json() == alone.ask("/health").json()
        names = [each.ask("/v1/models").json()["data"][0]["id"] for each in (server, alone)]
        assert names == ["tiny", "tiny"]
        edited = {"prompt": "Once", "edits": ["hook_embed*=2"]}
        assert content(server, COMPLETIONS, edited) == content(alone, COMPLETIONS, edited)
    assert server.metrics()["gpt_cli_requests_total{path=other,status=404}"] == 1


def test_no_request_is_lost_when_a_replica_is_killed(server, expected):
    """As the kernel does that runs out of memory."""
    assert len(replica_processes()) == 2
    actual = under_load(server, lambda: os.kill(replica_processes()[0], signal.SIGKILL), when=10)
    assert actual == expected
    server.wait_until_idle()


def test_no_request_is_lost_when_a_node_is_killed(server, cluster, expected):
    end = time.monotonic() + 60
    while len(replica_processes()) < 2:  # one has been killed
        assert time.monotonic() < end
        time.sleep(0.2)
    kill = lambda: cluster.remove_node(cluster.doomed, allow_graceful=False)  # noqa: E731
    assert under_load(server, kill, when=10) == expected
    assert len(replica_processes()) == 1


def test_a_text_is_dropped_when_its_client_leaves(server):
    connection = server.begin(prompt="Once", max_tokens=400, n=20, ignore_eos=True, stream=True)
    server.wait_for(lambda values: values["gpt_cli_texts_running"] > 0)
    connection.close()
    server.wait_until_idle()


# --- without a cluster ---------------------------------------------------------------------------


class Deployment:
    """A handle of replicas in this process; `fates` say when they die, and how."""

    def __init__(self, fates=()):
        self.replica = replicas.Replica(Model.of("tiny", {"threads": 1}, gpus=0), 32)
        self.fates = list(fates)
        self.sent = []

    def options(self, stream):
        assert stream
        return self

    @property
    def compute(self):
        return self

    def remote(self, text):
        self.sent.append(text)
        return Events(self.replica, text, self.fates.pop(0) if self.fates else None)


class Events:
    def __init__(self, replica, text, fate):
        self._events = self._die(replica.compute(text), *fate) if fate else replica.compute(text)

    def __aiter__(self):
        return self._events

    async def _die(self, events, count, error):
        """Pass on some events, and die."""
        async for message in events:
            for event in message[:count]:
                yield [event]
            count -= len(message)
            if count <= 0:
                break
        if isinstance(error, RayTaskError | ActorDiedError):
            raise error
        yield [error]

    def cancel(self):
        pass


def computed(deployment, body, embed=False):
    """Return the answer to a request whose texts a deployment computes, or the error."""

    async def compute():
        engine = gpt_cli.loading.load_reader("tiny")
        events = asyncio.Queue()

        def deliver(index, event):
            events.put_nowait((index, event))

        if embed:
            answer = EmbeddingAnswer(read_embeddings(engine, body), "tiny", deliver)
        else:
            request = read_completions(engine, body)
            answer = CompletionAnswer(engine, request, "tiny", "id", deliver)
        computing = replicas.Replicas(deployment, max_requests=1)
        computing.submit(answer.texts)
        with pytest.raises(QueueFullError):
            computing.submit(answer.texts)
        while not answer.finished:
            index, event = await asyncio.wait_for(events.get(), 60)
            if isinstance(event, Exception):
                return event
            answer.add(index, event)
        await asyncio.sleep(0)
        return without_time(json.loads(answer.json))

    return asyncio.run(compute())


@pytest.fixture
def quick(monkeypatch):
    """Let each message have one event or few, and retries come at once."""
    monkeypatch.setattr(replicas, "_STREAMED", 1e6)
    monkeypatch.setattr(replicas, "_PAUSE", 0)


BODIES = {
    "a text": {"max_tokens": 30},
    "a score": {"max_tokens": 9, "echo": True, "logprobs": 2},
    "a search": {"max_tokens": 12, "use_beam_search": True, "best_of": 3, "n": 2, "stream": False},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("error", [ActorDiedError(), gpt_cli.ResourceError("no memory")])
def test_a_text_is_continued_from_the_tokens_that_were_sent(kind, error, quick):
    body = {"prompt": "Once upon a time", "seed": 3, "stream": True} | BODIES[kind]
    fates = [(count, error) for count in (0, 1, 3, 0)]
    dying = Deployment(fates)
    assert computed(dying, body) == computed(Deployment(), body)
    known = [len(text.generated) for text in dying.sent]
    continued = {"a text": [0, 0, 1, 4, 4], "a score": [0, 0, 0, 3, 3], "a search": [0] * 5}
    assert known == continued[kind]


def test_vectors_are_computed_again(quick):
    body = {"input": ["The moon", "The sun"]}
    dying = Deployment([(0, ActorDiedError())] * 3)
    assert computed(dying, body, embed=True) == computed(Deployment(), body, embed=True)
    assert len(dying.sent) == 5


def test_a_text_that_no_replica_can_compute_is_an_error(quick):
    body = {"prompt": "Once", "max_tokens": 3}
    died = computed(Deployment([(0, ActorDiedError())] * 8), body)
    assert (RequestError.of(died).status, str(died)[:10]) == (503, "8 replicas")
    full = computed(Deployment([(0, gpt_cli.ResourceError("no memory"))] * 8), body)
    assert (RequestError.of(full).status, str(full)) == (503, "no memory")
    bug = RayTaskError("compute", "its traceback", ValueError())
    deployment = Deployment([(0, bug)])
    assert computed(deployment, body) is bug
    assert (RequestError.of(bug).status, len(deployment.sent)) == (500, 1)


def test_what_reads_requests_has_no_weights():
    reader, engine = gpt_cli.loading.load_reader("tiny"), gpt_cli.load("tiny")
    assert reader.encode("Once upon") == engine.encode("Once upon")
    assert reader.model.config == engine.model.config
    assert not isinstance(reader.model.wpe, type(engine.model.wpe))  # it is still in its file


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"replicas": 0}, OptionError, "replicas must be 1 or more"),
        ({"replicas": 3, "max_replicas": 2}, OptionError, "max_replicas must be at least"),
        ({"num_cpus": "1"}, TypeError, "num_cpus must be"),
        ({"cpus": 1}, TypeError, "unknown keyword cpus"),
        ({"load_options": {"dtyp": "int8"}}, TypeError, "dtyp .did you mean dtype"),
        ({"settings": {"port": 80}}, OptionError, "settings cannot have port"),
        ({"settings": {"max_batch": 0}}, InputError, "max_batch must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        gpt_cli.ray.server(**arguments)


def test_serve_run_passes_one_mapping_of_texts(monkeypatch):
    monkeypatch.setenv("GPT_CLI_API_KEY", "secret")
    assert len(inspect.signature(gpt_cli.ray.server).parameters) == 1  # Ray refuses others
    options = {"load_options": '{"dtype": "int8"}', "settings": '{"max_batch": 8}'}
    application = gpt_cli.ray.server(
        {"model": "7", "replicas": "2", "max_replicas": "4", "num_cpus": "0.5"} | options
    )
    ingress = application._bound_deployment
    model, settings, most, replica = ingress.init_args
    assert (model.path, model.loading["dtype"]) == ("7", "int8")
    assert (settings.api_key, settings.max_batch, most) == ("secret", 8, 4 * 8 + 64)
    scaling = replica._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 4)
    with pytest.raises(OptionError, match="replicas must be JSON"):
        gpt_cli.ray.server({"replicas": "two"})
