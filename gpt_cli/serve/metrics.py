"""Counters of a server, for Prometheus."""

from collections.abc import Mapping
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from gpt_cli import __version__
from gpt_cli.generation.row import Step
from gpt_cli.serve.prompts import Computing

_OLDER = 0.9  # the weight of earlier values in a mean


class Metrics:
    """The counters of `/metrics`, most of them for each model."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, schedulers: Mapping[str, Computing]):
        """Begin to count; `schedulers` are those of the models, by name."""
        self._schedulers = schedulers
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="gpt_cli", registry=self._registry)
        histogram = partial(Histogram, namespace="gpt_cli", registry=self._registry)
        gauge = partial(Gauge, namespace="gpt_cli", registry=self._registry)
        model = ["model"]
        ProcessCollector(registry=self._registry)  # memory, processor time, open files; on Linux
        self._info = gauge("info", "The version and the models.", ["version", "model", "dtype"])
        # The names of keys are those of --api-key-file, so that there are few.
        self.requests = counter("requests", "Requests.", ["path", "status", "key"])
        self._prompts = counter("prompt_tokens", "Tokens of prompts.", model)
        self._reused = counter("reused_tokens", "Tokens of prompts not computed again.", model)
        self._hits = counter("prefix_cache_hits", "Texts that began like an earlier one.", model)
        self._generated = counter("generated_tokens", "Generated tokens.", model)
        self._drafted = counter("drafted_tokens", "Drafted tokens.", model)
        self._accepted = counter("accepted_tokens", "Drafted tokens in texts.", model)
        self._request_seconds = histogram("request_seconds", "Time of an answer.", model)
        self._first_seconds = histogram("first_token_seconds", "Time to the first token.", model)
        running = gauge("texts_running", "Texts that are being computed.", model)
        waiting = gauge("texts_waiting", "Texts in the queue.", model)
        for name, scheduler in schedulers.items():
            running.labels(name).set_function(partial(getattr, scheduler, "running"))
            waiting.labels(name).set_function(partial(getattr, scheduler, "waiting"))
            for counted in (self._prompts, self._generated, self._drafted, self._accepted):
                counted.labels(name)  # is 0, and shown
            self._request_seconds.labels(name)
            self._first_seconds.labels(name)
        self._before = dict.fromkeys(schedulers, (0, 0))  # reused tokens and hits
        self.mean_seconds = 0.0  # of recent answers

    def text(self) -> bytes:
        """Return all values in Prometheus' format."""
        for name, scheduler in self._schedulers.items():
            reused, hits = self._before[name]
            self._before[name] = scheduler.reused, scheduler.hits
            self._reused.labels(name).inc(scheduler.reused - reused)
            self._hits.labels(name).inc(scheduler.hits - hits)
        return generate_latest(self._registry)

    def add_model(self, name: str, dtype: str) -> None:
        """Show a model and the type of its weights."""
        self._info.labels(__version__, name, dtype).set(1)

    def add_first(self, model: str, seconds: float) -> None:
        """Count the time to the first token of an answer."""
        self._first_seconds.labels(model).observe(seconds)

    def add_step(self, model: str, step: Step) -> None:
        """Count a generated token."""
        self._generated.labels(model).inc()
        self._drafted.labels(model).inc(step.drafted)
        self._accepted.labels(model).inc(step.accepted)

    def add_answer(self, model: str, prompt_tokens: int, seconds: float) -> None:
        """Count an answered request."""
        self._prompts.labels(model).inc(prompt_tokens)
        self._request_seconds.labels(model).observe(seconds)
        self.mean_seconds = _OLDER * (self.mean_seconds or seconds) + (1 - _OLDER) * seconds
