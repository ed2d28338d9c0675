"""The traffic of a soak: requests of many threads, in waves, and the count of what became of them.

The first wave is of short requests: all of them run at once; the second of many new tokens behind one prefix of half
the context, with so few to add that every step is full of prefills over it. So the server has the memory of its largest
batch and of its largest prefill before growth is looked for. Then log-normal lengths from 1 token to the model's
context, half over shared prefixes. Greedy and sampled; some are streamed, and of some the client closes the stream.
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

from bench.checks.agreement import PROMPT_TOKENS, must_be_finite
from bench.serving.client import FailedRequest, Wire, described
from bench.serving.engines import Engine

PREFIXES = 16
EDGE_LENGTHS = (1, 2, 63, 64, 65, 128, 129)
SHORT_PROMPTS = EDGE_LENGTHS[:5]
SHORT_REQUEST = 256  # tokens of a request of the first wave; the cache has room for 320 in each of 256
# A request of the second wave: tokens behind its prefix, so many that others wait for the engine and not for its front
# end, and that a step of 8192 tokens prefills 16 requests, with 4096 tokens before each; and tokens to add.
BEHIND_PREFIX, FEW_TOKENS = 512, 4
MARGIN = 16  # tokens below the model's context, for drafts
KEPT_EXAMPLES = 5


@dataclass(frozen=True)
class Settings:
    """What a run is made of: seconds, MiB, shares; `every` has the seconds from one to the next of what is repeated."""

    seconds: float
    concurrency: int
    timeout: float
    context: int
    abort_share: float
    stream_share: float
    every: dict[str, float]
    host_growth: float
    gpu_growth: float
    seed: int


class Tally:
    """What happened, counted by many threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._closed, self._lock = False, threading.Lock()

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)

    def close(self) -> None:
        """Count no more failures: what is still under way is cut off by the end of the run."""
        with self._lock:
            self._closed = True

    def fail(self, kind: str, text: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.failures[kind] += 1
            examples = self.examples.setdefault(kind, [])
            if len(examples) < KEPT_EXAMPLES:
                examples.append(text[:1000])

    def sentences(self) -> list[str]:
        with self._lock:
            return [f"{kind} ({count} times): {self.examples[kind][0]}" for kind, count in self.failures.items()]


class Traffic:
    """Threads that send one request after another, as many at once as the wave wants."""

    def __init__(self, engine: Engine, wire: Wire, settings: Settings, tally: Tally):
        self.engine, self.wire, self.settings, self.tally = engine, wire, settings, tally
        self.stop, self.wanted = threading.Event(), settings.concurrency
        self.wave = 0
        self._rng = random.Random(settings.seed)
        self._prefixes = [self._rng.choices(PROMPT_TOKENS, k=self._length(500, 2)) for _ in range(PREFIXES)]
        self._long_prefix = self._rng.choices(PROMPT_TOKENS, k=settings.context // 2)
        self.threads = [
            threading.Thread(target=self._work, args=(index, random.Random(f"{settings.seed} {index}")), daemon=True)
            for index in range(settings.concurrency)
        ]

    def _length(self, median: float, share: int, rng: random.Random | None = None) -> int:
        """Log-normal, up to that share of the context; sometimes just around a page or two."""
        rng = rng or self._rng
        if rng.random() < 0.05:
            return rng.choice(EDGE_LENGTHS)
        return max(1, min(round(median * math.exp(rng.gauss(0, 1.4))), (self.settings.context - MARGIN) // share))

    def new_wave(self) -> None:
        """Mostly everything at once, so that the cache overflows; sometimes few, whose graphs and splits are others."""
        self.wave, most = self.wave + 1, self.settings.concurrency
        if self.wave == 1:
            return
        self.wanted = self._rng.choice([most, most, most, max(1, most // 4), max(1, most // 32), 1])

    def request(self, rng: random.Random) -> tuple[list[int], int]:
        """A prompt, and how many tokens to add."""
        if self.wave == 0:
            prompt = rng.choices(PROMPT_TOKENS, k=rng.choice(SHORT_PROMPTS))
            return prompt, min(SHORT_REQUEST, self.settings.context) - MARGIN - len(prompt)
        if self.wave == 1:
            behind = rng.choices(PROMPT_TOKENS, k=min(BEHIND_PREFIX, self.settings.context // 4))
            return self._long_prefix + behind, FEW_TOKENS
        prompt = list(rng.choice(self._prefixes)) if rng.random() < 0.5 else []
        prompt += rng.choices(PROMPT_TOKENS, k=self._length(60 if prompt else 300, 2, rng))
        prompt = prompt[: self.settings.context - MARGIN - 1]
        room = self.settings.context - MARGIN - len(prompt)
        return prompt, min(self._length(150, 4, rng), room)

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
        body = self.engine.body(prompt, tokens, temperature=rng.choice([0, 0.7, 1.0]), logprobs=logprobs)
        self.tally.count(sent=1)
        if streams:
            got, ended = self.streamed(body, rng.randrange(tokens) if closes else sys.maxsize)
        else:
            reply = self.wire.whole(body)
            must_be_finite(self.engine, reply)
            got = self.engine.tokens_in(reply)
        if not ended:
            self.tally.count(aborted=1, prompt_tokens=len(prompt), output_tokens=got)
        elif got != tokens:
            raise FailedRequest("incomplete", f"wanted {tokens} tokens, got {got}: {described(body)}")
        else:
            self.tally.count(served=1, prompt_tokens=len(prompt), output_tokens=got)

    def streamed(self, body: dict, most_parts: int) -> tuple[int, bool]:
        """Tokens that came, and whether the stream ended before the client closed it, after so many parts."""
        count, tokens, end = 0, 0, time.monotonic() + self.settings.timeout
        with closing(self.wire.parts(body)) as parts:
            for count, part in enumerate(itertools.islice(parts, most_parts), 1):  # noqa: B007
                if time.monotonic() > end:
                    said = f"the stream did not end in {self.settings.timeout:g} s: {described(body)}"
                    raise FailedRequest("hung", said)
                must_be_finite(self.engine, part)
                tokens = self.engine.tokens_in(part, tokens)
        return tokens, count < most_parts

    def drained(self) -> list[threading.Thread]:
        """Send nothing more; the threads whose request did not end in time."""
        self.stop.set()
        end = time.monotonic() + self.settings.timeout + 5
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread for thread in self.threads if thread.is_alive()]
