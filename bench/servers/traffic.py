"""The traffic of a soak: requests of many threads, in waves, and the count of what became of them.

All requests of the first wave are short and run at once; those of the second have few new tokens behind one prefix of
half the context, so that every step is full of prefills over it. So the server has the memory of its largest batch and
largest prefill before growth is looked for. Then lengths are log-normal, half of them over shared prefixes, greedy and
sampled; some are streamed, and the client closes some streams.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from bench.servers import client
from bench.servers.agreement import PROMPT_TOKENS, must_be_finite
from bench.servers.client import FailedRequest, described
from bench.servers.engines import Sglang, Vllm

PREFIXES = 16
EDGE_LENGTHS = (1, 2, 63, 64, 65, 128, 129)
SHORT_REQUEST = 256  # tokens of a request of the first wave
BEHIND_PREFIX, FEW_TOKENS = 512, 4  # tokens behind the prefix in the second wave, and tokens to add
MARGIN = 16  # tokens below the model's context, for drafts
KEPT_EXAMPLES = 5


@dataclass(frozen=True)
class Settings:
    """Seconds, MiB and shares of a run; the `_every` are seconds between two of a kind."""

    context: int
    seconds: float = 600
    concurrency: int = 256
    timeout: float = 240  # of a request
    abort_share: float = 0.15  # of the requests, whose stream the client closes
    stream_share: float = 0.25  # of the others
    probe_every: float = 20
    sample_every: float = 5
    wave_every: float = 10
    host_growth: float = 512
    gpu_growth: float = 256

    @property
    def allowed_growth(self) -> dict[str, float]:
        return {"host": self.host_growth, "gpu": self.gpu_growth}


class Tally:
    """Counts and failures of many threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._closed, self._lock = False, threading.Lock()

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)

    def close(self) -> None:
        """Count no more failures: the end of the run cuts off what is under way."""
        with self._lock:
            self._closed = True

    def fail(self, kind: str, text: str) -> None:
        with self._lock:
            if not self._closed:
                self.failures[kind] += 1
                self.examples.setdefault(kind, [])[KEPT_EXAMPLES - 1 :] = [text[:1000]]

    def sentences(self) -> list[str]:
        with self._lock:
            return [f"{kind} ({count} times): {self.examples[kind][0]}" for kind, count in self.failures.items()]


class Traffic:
    """Threads that send one request after another, as many at once as the wave wants."""

    def __init__(self, engine: Vllm | Sglang, url: str, settings: Settings, tally: Tally, seed: int = 0):
        self.engine, self.url, self.settings, self.tally = engine, url, settings, tally
        self.http = client.new_client()
        self.stop, self.wanted, self.wave = threading.Event(), settings.concurrency, 0
        self._rng = random.Random(seed)
        self._prefixes = [self._rng.choices(PROMPT_TOKENS, k=self._length(500, 2, self._rng)) for _ in range(PREFIXES)]
        self._long_prefix = self._rng.choices(PROMPT_TOKENS, k=settings.context // 2)
        self.threads = [
            threading.Thread(target=self._work, args=(index, random.Random(f"{seed} {index}")), daemon=True)
            for index in range(settings.concurrency)
        ]

    def _length(self, median: float, share: int, rng: random.Random) -> int:
        """Log-normal, up to that share of the context; sometimes around a page or two."""
        if rng.random() < 0.05:
            return rng.choice(EDGE_LENGTHS)
        return max(1, min(round(median * math.exp(rng.gauss(0, 1.4))), (self.settings.context - MARGIN) // share))

    def new_wave(self) -> None:
        """Mostly all threads at once, so that the cache overflows; sometimes few, with other graphs and splits."""
        self.wave, most = self.wave + 1, self.settings.concurrency
        if self.wave > 1:
            self.wanted = self._rng.choice([most, most, most, max(1, most // 4), max(1, most // 32), 1])

    def request(self, rng: random.Random) -> tuple[list[int], int]:
        """A prompt, and how many tokens to add."""
        context = self.settings.context
        if self.wave == 0:
            prompt = rng.choices(PROMPT_TOKENS, k=rng.choice(EDGE_LENGTHS[:5]))
            return prompt, min(SHORT_REQUEST, context) - MARGIN - len(prompt)
        if self.wave == 1:
            return self._long_prefix + rng.choices(PROMPT_TOKENS, k=min(BEHIND_PREFIX, context // 4)), FEW_TOKENS
        prompt = list(rng.choice(self._prefixes)) if rng.random() < 0.5 else []
        prompt += rng.choices(PROMPT_TOKENS, k=self._length(60 if prompt else 300, 2, rng))
        prompt = prompt[: context - MARGIN - 1]
        return prompt, min(self._length(150, 4, rng), context - MARGIN - len(prompt))

    def _work(self, index: int, rng: random.Random) -> None:
        while not self.stop.is_set():
            if index >= self.wanted:
                self.stop.wait(0.05)
                continue
            try:
                self._one(rng)
            except FailedRequest as fault:
                self.tally.fail(fault.kind, str(fault))
                self.stop.wait(1)

    def _one(self, rng: random.Random) -> None:
        prompt, tokens = self.request(rng)
        closes, ended = rng.random() < self.settings.abort_share, True
        streams = closes or rng.random() < self.settings.stream_share
        # SGLang repeats all log-probabilities in every part of a stream.
        logprobs = 0 if streams and not self.engine.parts_are_new else 2
        body = self.engine.body(prompt, tokens, temperature=rng.choice([0.0, 0.7, 1.0]), logprobs=logprobs)
        self.tally.count(sent=1)
        if streams:
            got, ended = self._streamed(body, rng.randrange(tokens) if closes else sys.maxsize)
        else:
            reply = client.ask(self.http, self.url, body, self.settings.timeout)
            must_be_finite(self.engine, reply)
            got = self.engine.tokens_in(reply)
        if ended and got != tokens:
            raise FailedRequest("incomplete", f"wanted {tokens} tokens, got {got}: {described(body)}")
        counts = {"served" if ended else "aborted": 1}
        self.tally.count(**counts, prompt_tokens=len(prompt), output_tokens=got)

    def _streamed(self, body: dict, most_parts: int) -> tuple[int, bool]:
        """Tokens that came, and whether the stream ended before the client closed it, after so many parts."""
        count, tokens, timeout = 0, 0, self.settings.timeout
        end = time.monotonic() + timeout
        with closing(client.stream(self.http, self.url, body, timeout)) as parts:
            for part in itertools.islice(parts, most_parts):
                if time.monotonic() > end:
                    raise FailedRequest("hung", f"the stream did not end in {timeout:g} s: {described(body)}")
                must_be_finite(self.engine, part)
                count, tokens = count + 1, self.engine.tokens_in(part, tokens)
        return tokens, count < most_parts

    def drained(self) -> list[threading.Thread]:
        """Send nothing more; the threads whose request did not end in time."""
        self.stop.set()
        end = time.monotonic() + self.settings.timeout + 5
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread for thread in self.threads if thread.is_alive()]
