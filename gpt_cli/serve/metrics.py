"""Counters of a server, for Prometheus."""

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
from gpt_cli.serve.scheduler import Scheduler

_OLDER = 0.9  # the weight of earlier values in a mean


class Metrics:
    """The counters of `/metrics`."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="gpt_cli", registry=self._registry)
        histogram = partial(Histogram, namespace="gpt_cli", registry=self._registry)
        gauge = partial(Gauge, namespace="gpt_cli", registry=self._registry)
        ProcessCollector(registry=self._registry)  # memory, processor time, open files; on Linux
        self._info = gauge("info", "The version and the models.", ["version", "model", "dtype"])
        # The names of keys are those of --api-key-file, so that there are few.
        self.requests = counter("requests", "Requests.", ["path", "status", "key"])
        self._prompts = counter("prompt_tokens", "Tokens of prompts.")
        self._reused = counter("reused_tokens", "Tokens of prompts not computed again.")
        self._hits = counter("prefix_cache_hits", "Texts that began like an earlier one.")
        self._generated = counter("generated_tokens", "Generated tokens.")
        self._drafted = counter("drafted_tokens", "Drafted tokens.")
        self._accepted = counter("accepted_tokens", "Drafted tokens in texts.")
        self._request_seconds = histogram("request_seconds", "Time of an answer.")
        self.first_seconds = histogram("first_token_seconds", "Time to the first token.")
        running = gauge("texts_running", "Texts that are being computed.")
        running.set_function(lambda: scheduler.running)
        waiting = gauge("texts_waiting", "Texts in the queue.")
        waiting.set_function(lambda: scheduler.waiting)
        self._reused_before = self._hits_before = 0
        self.mean_seconds = 0.0  # of recent answers

    def text(self) -> bytes:
        """Return all values in Prometheus' format."""
        reused, hits = self._scheduler.reused, self._scheduler.hits
        self._reused.inc(reused - self._reused_before)
        self._hits.inc(hits - self._hits_before)
        self._reused_before, self._hits_before = reused, hits
        return generate_latest(self._registry)

    def add_model(self, name: str, dtype: str) -> None:
        """Show a model and the type of its weights."""
        self._info.labels(__version__, name, dtype).set(1)

    def add_step(self, step: Step) -> None:
        """Count a generated token."""
        self._generated.inc()
        self._drafted.inc(step.drafted)
        self._accepted.inc(step.accepted)

    def add_answer(self, prompt_tokens: int, seconds: float) -> None:
        """Count an answered request."""
        self._prompts.inc(prompt_tokens)
        self._request_seconds.observe(seconds)
        self.mean_seconds = _OLDER * (self.mean_seconds or seconds) + (1 - _OLDER) * seconds
