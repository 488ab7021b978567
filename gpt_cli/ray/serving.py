"""The server as an application of Ray Serve: an ingress that reads requests, and replicas.

    client ──▶ Ray's proxy ──▶ ingress ──texts──▶ replica, on any node
                 └── head node ──┘   ◀──events──

The ingress holds what has been sent to clients. It is beside the proxy of the head node, so that
other nodes may die without a request that is lost.
"""

import inspect
import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from gpt_cli.errors import import_extra
from gpt_cli.hub import shown_name
from gpt_cli.jobs.cluster import Model
from gpt_cli.loading import load
from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.declare import AT_LEAST_0, AT_LEAST_1, OptionError, check, check_keywords
from gpt_cli.serve.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Receive, Scope, Send

F = TypeVar("F", bound=Callable[..., Any])

_OF_RAY = ("host", "port", "unix_socket", "grace")  # settings
_HEAD = "node:__internal_head__"  # a resource that only the head node has
_ANY_NUMBER = 1_000_000  # of requests: the ingress itself refuses too many


class _Ingress:
    """Reads requests and writes answers; replicas compute their texts."""

    def __init__(
        self, model: Model, settings: Settings, max_requests: int, replicas: "DeploymentHandle[Any]"
    ):
        from gpt_cli.ray.replicas import Replicas
        from gpt_cli.serve.app import application_of
        from gpt_cli.serve.front.keys import Keys
        from gpt_cli.serve.responses import ServedModel, Service

        reader = model.load_reader()
        name = settings.name or shown_name(reader.name)
        served = ServedModel(name, reader, Replicas(replicas, max_requests))
        keys = Keys(settings.api_key, settings.api_key_file)
        self.application = application_of(Service.of([served], settings), settings, keys)


def _application_here() -> "ASGIApp":
    """Return the application of the ingress in this process; Ray Serve calls it there."""
    from ray import serve
    from starlette.routing import Router

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        ingress: Any = serve.get_replica_context().servable_object
        await ingress.application(scope, receive, send)

    return Router(default=answer)  # which also answers when the application starts and ends


def _for_serve_run(function: F) -> F:
    """Let `serve run` call a function: it passes its arguments as one mapping of texts."""

    @wraps(function)
    def call(*arguments: Mapping[str, Any], **options: Any) -> Any:
        for mapping in arguments:
            options = {name: _value(name, value) for name, value in mapping.items()}
        return function(**options)

    # Ray refuses a function with more than one parameter.
    options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = inspect.Signature([options])  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _value(name: str, value: Any) -> Any:
    """Return the value of an argument from a shell or a configuration file."""
    if name == "model" or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise OptionError(name, f"must be JSON, not {value!r:.40}") from None


@_for_serve_run
@checks_arguments()
def server(
    *,
    model: str = "gpt2",
    replicas: int = 1,
    max_replicas: int | None = None,
    num_cpus: int | float = 1,
    num_gpus: int | float = 0,
    load_options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> "Application":
    """Return the server of `gpt-cli serve` as an application of Ray Serve.

    Any replica may answer, since all compute the same bits. If one dies, another continues its
    texts, so no request is lost while the head node lives: the ingress is there, without weights.

        ray.serve.run(gpt_cli.ray.server(model="gpt2", replicas=4))

    `serve run gpt_cli.ray:server model=gpt2 replicas=4` does the same; there, values are JSON,
    except the model. Raise OptionError for a value that is out of range.

    Args:
        model: a name or a folder, as for `gpt_cli.load`; a folder must be on every node.
        replicas: processes that hold the model.
        max_replicas: so many replicas if there are many requests, by Ray's autoscaling.
        num_cpus: of a replica, which has as many threads.
        num_gpus: of a replica, perhaps a part of one; without a GPU, it computes on the CPU.
        load_options: keywords of `gpt_cli.load`, such as dtype.
        settings: fields of `gpt_cli.serve.Settings`, such as name. By default, `api_key` is
            GPT_CLI_API_KEY. `max_batch` is that of each replica. Where the server listens, and how
            long it waits at its end, are options of Ray.
    """
    serve = import_extra("a server on a cluster needs Ray Serve", "'ray[serve]'", "ray.serve")
    from gpt_cli.ray.replicas import Replica

    most = replicas if max_replicas is None else max_replicas
    check("replicas", replicas, AT_LEAST_1)
    check("num_cpus", num_cpus, AT_LEAST_0)
    check("num_gpus", num_gpus, AT_LEAST_0)
    if most < replicas:
        raise OptionError("max_replicas", f"must be at least replicas, which is {replicas}")
    loading = dict(load_options or {})
    check_keywords(loading, inspect.signature(load).parameters)
    served = Model.of(model, loading, num_gpus)
    chosen = _settings(settings or {})
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if most > replicas:
        scaling = {
            "num_replicas": "auto",
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": most,
                "target_ongoing_requests": max(1, chosen.max_batch // 2),
            },
        }
    computing = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=chosen.max_batch,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        logging_config={"enable_access_log": False},  # it would have a line for each text
        **scaling,
    )
    ingress = serve.deployment(
        serve.ingress(_application_here)(_Ingress),
        name="Ingress",
        max_ongoing_requests=_ANY_NUMBER,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
    )
    max_requests = chosen.max_batch * most + chosen.max_queue
    application: Application = ingress.bind(
        served, chosen, max_requests, computing.bind(served, chosen.max_batch)
    )
    return application


def _settings(fields: Mapping[str, Any]) -> Settings:
    """Return the settings of a server whose socket and end are Ray's."""
    for name in _OF_RAY:
        if name in fields:
            raise OptionError("settings", f"cannot have {name}: it is an option of Ray Serve")
    return Settings(**{"api_key": os.environ.get("GPT_CLI_API_KEY"), **fields})
