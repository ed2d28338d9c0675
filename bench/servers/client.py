"""HTTP requests to a server of either engine, and the samples of its /metrics."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

HEALTH_SECONDS, METRICS_SECONDS = 5, 20
SHOWN = 500


class Failed(RuntimeError):
    """A process or a request failed or took too long; the text says what was wanted and what came."""


class FailedRequest(Failed):
    """A request without its answer; `kind` is the name under which it is counted."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def new_client() -> httpx.Client:
    """A client for many threads. Each request has its own connection, so none waits for another or meets one that the
    server just closed. Proxies of the environment are ignored: servers run on this machine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(limits=limits, trust_env=False, verify=False)


def is_healthy(url: str) -> bool:
    try:
        with new_client() as http:
            return http.get(f"{url}/health", timeout=HEALTH_SECONDS).is_success
    except httpx.HTTPError:
        return False


def metrics(url: str) -> dict[str, float]:
    """Samples of /metrics by name, summed over their labels; empty where the server does not answer."""
    sums: Counter[str] = Counter()
    try:
        with new_client() as http:
            reply = http.get(f"{url}/metrics", timeout=METRICS_SECONDS).raise_for_status()
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                sums[sample.name] += float(sample.value)
    except (httpx.HTTPError, ValueError):
        return {}
    return dict(sums)


@contextmanager
def _failed_requests(seconds: float, body: dict | None) -> Iterator[None]:
    """Turn errors of HTTP into FailedRequest."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise FailedRequest("hung", f"no answer in {seconds:g} s: {described(body)}") from error
    except httpx.HTTPStatusError as error:
        text = error.response.text[:SHOWN]
        raise FailedRequest("HTTP error", f"wanted status 200, got {error.response.status_code}: {text}") from error
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise FailedRequest("HTTP error", f"{error!r}: {described(body)}") from error


def ask(http: httpx.Client, url: str, body: dict | None, seconds: float) -> dict:
    """The reply to a POST, {} if it is not JSON. Raises FailedRequest."""
    with _failed_requests(seconds, body):
        reply = http.post(url, json=body, timeout=seconds).raise_for_status()
        return reply.json() if "json" in reply.headers.get("content-type", "") else {}


def ask_all(url: str, bodies: Sequence[dict], concurrency: int, seconds: float) -> list[dict]:
    """All replies in order, `concurrency` requests at a time. Raises FailedRequest unless all come in `seconds`."""
    end = time.monotonic() + seconds
    pool, http = ThreadPoolExecutor(concurrency), new_client()  # an AsyncClient takes three times as long
    try:
        replies = list(pool.map(lambda body: ask(http, url, body, max(0.001, end - time.monotonic())), bodies))
    finally:  # after a failure the other requests end with the server; closing their connections here could hang
        pool.shutdown(wait=False, cancel_futures=True)
    http.close()
    return replies


def stream(http: httpx.Client, url: str, body: dict, seconds: float) -> Generator[dict]:
    """The parts of a streamed reply; closing the generator closes the connection.

    Raises FailedRequest when the stream breaks off before its end.
    """
    options = {"json": body | {"stream": True}, "timeout": seconds}
    with _failed_requests(seconds, body), http.stream("POST", url, **options) as reply:
        if not reply.is_success:
            reply.read()
            reply.raise_for_status()
        for line in reply.iter_lines():
            if (text := line.removeprefix("data:").strip()) == "[DONE]":
                return
            if text:
                part = json.loads(text)
                if "error" in part:
                    raise FailedRequest("HTTP error", f"in a stream: {part['error']}")
                yield part
    raise FailedRequest("HTTP error", f"the stream broke off: {described(body)}")


def described(body: dict | None) -> str:
    """A request of either engine in a few words."""
    body = body or {}
    prompt, parameters = body.get("prompt") or body.get("input_ids") or [], body.get("sampling_params", body)
    limits = {key: parameters[key] for key in ("max_tokens", "max_new_tokens", "temperature") if key in parameters}
    return f"{len(prompt)} prompt tokens, {limits}"
