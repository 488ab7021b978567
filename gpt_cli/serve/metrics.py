"""Counters of a server, for Prometheus."""

from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from gpt_cli.generation.row import Step
from gpt_cli.serve.scheduler import Scheduler

_OLDER = 0.9  # of a mean, with the next value


class Metrics:
    """The counters of `/metrics`."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._registry = CollectorRegistry()
        shared: Any = {"namespace": "gpt_cli", "registry": self._registry}
        self.requests = Counter("requests", "Requests.", ["path", "status"], **shared)
        self._prompts = Counter("prompt_tokens", "Tokens of prompts.", **shared)
        self._reused = Counter("reused_tokens", "Tokens of prompts not computed again.", **shared)
        self._generated = Counter("generated_tokens", "Generated tokens.", **shared)
        self._drafted = Counter("drafted_tokens", "Drafted tokens.", **shared)
        self._accepted = Counter("accepted_tokens", "Drafted tokens in texts.", **shared)
        self._request_seconds = Histogram("request_seconds", "Time of an answer.", **shared)
        self.first_seconds = Histogram("first_token_seconds", "Time to the first token.", **shared)
        running = Gauge("texts_running", "Texts that are being computed.", **shared)
        running.set_function(lambda: scheduler.running)
        waiting = Gauge("texts_waiting", "Texts in the queue.", **shared)
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
