"""Steps whose requests share prefixes: their block tables, and what a plan says of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

from etap_backend.schedule import BuiltSchedule, stack_shape
from support.cases import WILD_PAGES

LEAST_TILES = 8  # of a stack
TILE = 64


class Tree:
    """Lengths and block tables of a step; wild entries behind each request's pages."""

    def __init__(self, requests: list[tuple[int, int]], page_size: int, shared_tiles: int, trunk: int = 0):
        """Requests (group, tokens), whose groups share so many tiles, and all of them `trunk` pages."""
        pages = -(-shared_tiles * TILE // page_size)
        rows, fresh = [], 10_000
        for group, tokens in requests:
            needed = -(-tokens // page_size)
            row = [page if page < trunk else 1000 * (group + 1) + page for page in range(min(pages, needed))]
            rows.append([*row, *range(fresh, fresh + needed - len(row))])
            fresh += needed
        self._lay_out(rows, [tokens for _, tokens in requests], page_size)

    def _lay_out(self, rows: list[list[int]], lengths: list[int], page_size: int) -> None:
        self.lengths, self.page_size = lengths, page_size
        width = max(map(len, rows), default=0) + 3
        table = torch.tensor(WILD_PAGES, dtype=torch.int32).repeat(len(rows) * (width + 2))[: len(rows) * (width + 2)]
        table = table.view(len(rows), width + 2)  # the same wild entries behind requests, or others
        for request, row in enumerate(rows):
            table[request, : len(row)] = torch.tensor(row, dtype=torch.int32)
        self.block_table, self.seq_lens = table[:, :width], torch.tensor(lengths, dtype=torch.int32)

    @classmethod
    def of_rows(cls, rows: list[list[int]], page_size: int) -> Tree:
        """Of block tables, whose requests fill all pages."""
        tree = cls.__new__(cls)
        tree._lay_out(rows, [len(row) * page_size for row in rows], page_size)
        return tree

    @classmethod
    def drawn(cls, batch: int, page_size: int, seed: int) -> Tree:
        """Prefixes that grow from each other's, end within a page or a tile, or agree again behind a difference."""
        draw = random.Random(seed)
        rows: list[list[int]] = []
        lengths = []
        fresh = iter(range(1, 1 << 30))
        scale = max(1, TILE // page_size)
        for _ in range(batch):
            parent = draw.choice(rows) if rows and draw.random() < 0.8 else []
            kept = parent[: draw.choice([len(parent), draw.randint(0, len(parent))])]
            row = kept + [next(fresh) for _ in range(draw.randint(0, 12 * scale))]
            kind = draw.random()
            if kind < 0.1 and row:  # a duplicate of one page, the rest as before
                row[draw.randrange(len(row))] = next(fresh)
            elif kind < 0.15:
                row = row[:1] * (20 * scale)
            rows.append(row)
            short = draw.choice([0, 0, draw.randint(0, page_size - 1), draw.randint(0, 5 * TILE)])
            lengths.append(max(0, len(row) * page_size - short))
        tree = cls.__new__(cls)
        used = [row[: -(-tokens // page_size)] for row, tokens in zip(rows, lengths, strict=True)]
        tree._lay_out(used, lengths, page_size)
        return tree


class Stack(NamedTuple):
    members: list[int]
    tokens: int


@dataclass
class Plan:
    """A plan's fields, as csrc/schedule/shared_prefixes.h names them."""

    order: list[int]
    common: list[int]
    own_lens: list[int]
    first_tiles: list[int]
    places: list[int]
    stacks: list[Stack]
    stack_slots: list[int]


def plan_of(planned: BuiltSchedule) -> Plan:
    order, common, own_lens, first_tiles, places, lens, offsets, one, two, counts = planned.shared.tolist()
    room, count = stack_shape(planned.s_q * planned.num_heads, planned.num_sms).places, counts[0]
    members = one + two
    stacks = [
        Stack([member for member in members[s * room : (s + 1) * room] if member >= 0], lens[s]) for s in range(count)
    ]
    of_requests = (field[: planned.batch] for field in (order, common, own_lens, first_tiles, places))
    return Plan(*of_requests, stacks, [offsets[s + 1] - offsets[s] for s in range(count)])
