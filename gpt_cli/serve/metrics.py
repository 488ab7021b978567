"""Counters of a server, for Prometheus."""

from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from gpt_cli.generation.row import Step
from gpt_cli.serve.prompts import Computing

_OLDER = 0.9  # the weight of earlier values in a mean


class Metrics:
    """The counters of `/metrics`."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, scheduler: Computing):
        self._scheduler = scheduler
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="gpt_cli", registry=self._registry)
        histogram = partial(Histogram, namespace="gpt_cli", registry=self._registry)
        gauge = partial(Gauge, namespace="gpt_cli", registry=self._registry)
        self.requests = counter("requests", "Requests.", ["path", "status"])
        self._prompts = counter("prompt_tokens", "Tokens of prompts.")
        self._reused = counter("reused_tokens", "Tokens of prompts not computed again.")
        self._generated = counter("generated_tokens", "Generated tokens.")
        self._drafted = counter("drafted_tokens", "Drafted tokens.")
        self._accepted = counter("accepted_tokens", "Drafted tokens in texts.")
        self._request_seconds = histogram("request_seconds", "Time of an answer.")
        self.first_seconds = histogram("first_token_seconds", "Time to the first token.")
        running = gauge("texts_running", "Texts that are being computed.")
        running.set_function(lambda: scheduler.running)
        waiting = gauge("texts_waiting", "Texts in the queue.")
        waiting.set_function(lambda: scheduler.waiting)
        self._reused_before = 0
        self.mean_seconds = 0.0  # of recent answers

    def text(self) -> bytes:
        """Return all values in Prometheus' format."""
        reused = self._scheduler.reused
        self._reused.inc(reused - self._reused_before)
        self._reused_before = reused
        return generate_latest(self._registry)

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
