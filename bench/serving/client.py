"""Requests to a server of either engine, and what its /metrics say."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

# Every request has a connection of its own: none waits for another's, and none meets one that the server gave up just
# then. A proxy of the environment is none for a server of this machine, and there is no certificate to check.
OPTIONS = {
    "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
    "trust_env": False,
    "verify": False,
}
HEALTH_SECONDS, METRICS_SECONDS = 5, 20
SHOWN = 500


class Failed(RuntimeError):
    """A process or a request did not do, or not in time, what it was there for; the text says what instead."""


class FailedRequest(Failed):
    """A request without its answer; `kind` is what it is counted as."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Deadline:
    """The end of all waiting, by time.monotonic()."""

    at: float

    def left(self, most: float, what: str) -> float:
        """Seconds that `what` may take, at most `most`. Raises Failed when there are none."""
        seconds = min(most, self.at - time.monotonic())
        if seconds <= 0:
            raise Failed(f"no time left for {what}")
        return seconds


def is_healthy(url: str) -> bool:
    """Whether /health answers with success."""
    try:
        return _get(f"{url}/health", HEALTH_SECONDS).is_success
    except httpx.HTTPError:
        return False


def _get(url: str, seconds: float) -> httpx.Response:
    with httpx.Client(timeout=seconds, **OPTIONS) as http:
        return http.get(url)


def post(url: str, body: dict | None = None, seconds: float = 60) -> dict:
    """The reply, {} where there is no JSON. Raises FailedRequest when the server does not do what it is asked for."""
    with _as_failed_requests(seconds, url), httpx.Client(timeout=seconds, **OPTIONS) as http:
        answer = http.post(url, json=body)
        must_be_ok(answer.status_code, answer.text)
        return answer.json() if "json" in answer.headers.get("content-type", "") else {}


def metrics(url: str) -> dict[str, float]:
    """The samples of /metrics by name, summed over their labels; none where the server does not answer."""
    try:
        answer = _get(f"{url}/metrics", METRICS_SECONDS)
        return samples(answer.text) if answer.is_success else {}
    except (httpx.HTTPError, ValueError):
        return {}


def samples(text: str) -> dict[str, float]:
    """What the text of /metrics has. Raises ValueError when it is in another format."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += float(sample.value)
    return dict(sums)


def counted(found: dict[str, float], names: dict[str, str]) -> dict[str, float | None]:
    """These of the samples, by names of ours; None where a sample is absent."""
    return {ours: found.get(name) for ours, name in names.items()}


def must_be_ok(status: int, text: str) -> None:
    if status != httpx.codes.OK:
        raise FailedRequest("HTTP error", f"wanted status 200, got {status}: {text[:SHOWN]}")


@contextmanager
def _as_failed_requests(seconds: float, what: str) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise FailedRequest("hung", f"no answer in {seconds:g} s: {what}") from error
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise FailedRequest("HTTP error", f"{error!r}: {what}") from error


def ask_all(url: str, bodies: Sequence[dict], concurrency: int, seconds: float) -> list[dict]:
    """The replies to all, in order, `concurrency` at a time. Raises FailedRequest unless all come in `seconds`."""
    end = time.monotonic() + seconds

    def ask(body: dict) -> dict:
        with _as_failed_requests(seconds, f"{len(bodies)} requests"):
            answer = http.post(url, json=body, timeout=max(0.001, end - time.monotonic()))
            must_be_ok(answer.status_code, answer.text)
            return answer.json()

    pool, http = ThreadPoolExecutor(concurrency), httpx.Client(**OPTIONS)  # an AsyncClient takes three times as long
    try:
        replies = list(pool.map(ask, bodies))
    finally:  # what still waits for its answer ends with the server, but not if its connection is closed here
        pool.shutdown(wait=False, cancel_futures=True)
    http.close()
    return replies


class Wire:
    """Requests of many threads to one path of a server."""

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds = url, seconds
        self._http = httpx.Client(timeout=seconds, **OPTIONS)

    def whole(self, body: dict) -> dict:
        """The reply. Raises FailedRequest when there is none."""
        with _as_failed_requests(self.seconds, described(body)):
            answer = self._http.post(self.url, json=body)
            must_be_ok(answer.status_code, answer.text)
            return answer.json()

    def parts(self, body: dict) -> Iterator[dict]:
        """The parts of a streamed reply as they come; the connection ends with the generator. Raises FailedRequest when
        the stream breaks off before its end."""
        with (
            _as_failed_requests(self.seconds, described(body)),
            self._http.stream("POST", self.url, json=body | {"stream": True}) as answer,
        ):
            if not answer.is_success:
                must_be_ok(answer.status_code, answer.read().decode(errors="replace"))
            for line in answer.iter_lines():
                if (text := line.removeprefix("data:").strip()) == "[DONE]":
                    return
                if text:
                    part = json.loads(text)
                    if "error" in part:
                        raise FailedRequest("HTTP error", f"in a stream: {part['error']}")
                    yield part
        raise FailedRequest("HTTP error", f"the stream broke off: {described(body)}")

    def close(self) -> None:
        self._http.close()


def described(body: dict) -> str:
    """A request of either engine in a few words."""
    prompt = body.get("prompt") or body.get("input_ids")
    parameters = body.get("sampling_params", body)
    said = {key: parameters[key] for key in ("max_tokens", "max_new_tokens", "temperature") if key in parameters}
    return f"{len(prompt)} prompt tokens, {said}, streamed {body.get('stream', False)}"
