"""Trains a small real model of the DeepSeek-V3 architecture, or of V3.2's, for the checks of answers.

    PYTHONPATH=tests python -m bench.qualify.train_model OUTPUT [--seconds 240] [--index-top-k 512]

Needs torch, safetensors and tokenizers, and a GPU with 40 GB; no network. The text is Python's own standard library,
its sources and its documentation (pydoc_data), as any machine has it. Attention has DeepSeek's dimensions (latent 512,
rope 64, 128 + 64 wide heads, 16 of them as on one of 8 tensor-parallel ranks); the rest is narrow.

It learns by heart: half of the training sequences are from a fortieth of the files, so few that each is seen many
times. How they go on is then so certain that the rounding of two correct kernels does not change it, and a wrong kernel
does. Three eighths are passages, of text or of noise, and then some of them again, which teaches to answer from
thousands of tokens back. The folder gets prompts.json:

- recite: the text learned by heart, up to some place. The right answer is known: how it goes on.
- recall: several passages of files that training never sees, and then the beginning of one. The same.
- continuation: unseen text. Many tokens would do here, so that rounding may well choose another.

The main layers are dense, because routing turns rounding into jumps; the layer for multi-token prediction (MTP), which
engines expect to have experts, has them. It proposes tokens only, so it changes no answer.

With --index-top-k attention is sparse, as in DeepSeek-V3.2: each layer has an indexer, which names so many tokens that
a token attends to. The model learns densely, as without; its indexers learn beside it to score tokens as attention
weighs them, in a few queries of each sequence, and change nothing in it. The losses that are reported at the end are
those with the indexers' choice. vLLM has its fast kernels for 512, 1024 and 2048. SGLang 0.5.17 takes 2048 alone: the
weights do not depend on the number, so a copy of the folder serves whose config.json has that index_topk.

Checked: the checkpoint gives the logits of the model in training, and those of transformers' DeepseekV3ForCausalLM
(tests/vllm/test_contract_answers.py).
"""

import json
import math
import random
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
ROPE_THETA = 10000.0
NORM_EPS = 1e-6
PASSAGE, DOCUMENT_END = "<|passage|>", "<|end|>"
HELD_OUT = 20  # one file of so many is for prompts only
BY_HEART = 40  # one file of so many is learned by heart
CUE_TOKENS, ANSWER_TOKENS = 24, 32
INDEX_HEADS, INDEX_WIDTH = 64, 128
INDEX_QUERIES = 32  # of each sequence that an indexer learns from in a step
SPARSE_ROWS = 128  # queries at a time where attention is sparse
PASSAGE_TOKENS = range(16, 401)  # in training; in prompts they are long enough to hold cue and answer

console = Console(width=120)


@dataclass(frozen=True)
class Shape:
    """What may differ between the model and its miniature in a test; attention's own dimensions may not."""

    hidden: int = 512
    layers: int = 4
    heads: int = 16
    query_latent: int = 256
    feed_forward: int = 1536
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 256
    vocabulary: int = 4096
    context: int = 8192
    index_top_k: int = 0  # tokens that each token attends to; 0: all


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int):
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # of two types torch has no fused form


def rotate(x: Tensor, positions: Tensor | None = None, halves: bool = False) -> Tensor:
    """Rotary embedding of [batch, tokens, heads, 64] by position, of pairs of neighbouring elements, or of `halves`."""
    positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
    frequency = ROPE_THETA ** -(torch.arange(0, ROPE, 2, device=x.device, dtype=torch.float32) / ROPE)
    angle = positions.float()[:, None, None] * frequency
    first, second = x.float().unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(-2 if halves else -1)
    cos, sin = angle.cos(), angle.sin()
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.stack(turned, -2 if halves else -1).flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    """DeepSeek-V3.2's: scores every token for every query by a few narrow heads that share their key."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.wq_b = linear(shape.query_latent, INDEX_HEADS * INDEX_WIDTH)
        self.wk = linear(shape.hidden, INDEX_WIDTH)
        self.k_norm = nn.LayerNorm(INDEX_WIDTH, eps=NORM_EPS)
        self.weights_proj = linear(shape.hidden, INDEX_HEADS)

    def project(self, x: Tensor, query_latent: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, rows, heads, width], keys [batch, tokens, width], weights [batch, rows, heads]; some rows
        or all."""
        rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows
        q = self.wq_b(query_latent[:, rows]).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
        k = F.layer_norm(self.wk(x).float(), (INDEX_WIDTH,), self.k_norm.weight, self.k_norm.bias, NORM_EPS)
        k = k.to(q.dtype).unsqueeze(2)
        q = torch.cat([rotate(q[..., :ROPE], rows, halves=True), q[..., ROPE:]], -1)
        k = torch.cat([rotate(k[..., :ROPE], halves=True), k[..., ROPE:]], -1)
        return q, k.squeeze(2), self.weights_proj(x[:, rows]) * INDEX_HEADS**-0.5

    @staticmethod
    def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """[batch, queries, tokens] in float32."""
        relevant = F.relu(torch.einsum("bqhd,bkd->bqhk", q, k)) * INDEX_WIDTH**-0.5
        return torch.einsum("bqhk,bqh->bqk", relevant, weights.to(relevant.dtype)).float()


class Attention(nn.Module):
    """MLA as in training: keys and values are projected up from the latent."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.top_k = shape.heads, shape.index_top_k
        self.q_a_proj = linear(shape.hidden, shape.query_latent)
        self.q_a_layernorm = RMSNorm(shape.query_latent)
        self.q_b_proj = linear(shape.query_latent, shape.heads * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(shape.hidden, LATENT + ROPE)
        self.kv_a_layernorm = RMSNorm(LATENT)
        self.kv_b_proj = linear(LATENT, shape.heads * (NOPE + VALUE))
        self.o_proj = linear(shape.heads * VALUE, shape.hidden)
        if self.top_k:
            self.indexer = Indexer(shape)
        self.sparse = False
        self.index_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        query_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(query_latent).unflatten(-1, (self.heads, NOPE + ROPE))
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, NOPE + VALUE))
        k_nope, value = up.split([NOPE, VALUE], -1)
        k_rope = rotate(k_rope.unsqueeze(2)).expand(-1, -1, self.heads, -1)
        query = torch.cat([q_nope, rotate(q_rope)], -1)
        key = torch.cat([k_nope, k_rope.to(k_nope.dtype)], -1)
        # Flash attention takes keys and values of one width only.
        padded = F.pad(value, (0, NOPE + ROPE - VALUE))
        query, key, padded = (part.transpose(1, 2) for part in (query.to(value.dtype), key, padded))
        scale = (NOPE + ROPE) ** -0.5
        if self.top_k and self.sparse:
            out = self.sparsely(query, key, padded, scale, x, query_latent)
        else:
            out = F.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scale)
        if self.top_k and self.training:
            # The indexer learns beside the model and does not change it.
            self.index_loss = self.divergence(query.detach(), key.detach(), scale, x.detach(), query_latent.detach())
        return self.o_proj(out[..., :VALUE].transpose(1, 2).flatten(-2))

    def divergence(self, query: Tensor, key: Tensor, scale: float, x: Tensor, query_latent: Tensor) -> Tensor:
        """How far the indexer's scores are from attention's mean over the heads, in nats, in queries by chance."""
        tokens = query.shape[2]
        rows = torch.randint(tokens, (min(INDEX_QUERIES, tokens),), device=query.device)
        later = torch.arange(tokens, device=query.device) > rows[:, None]
        with torch.no_grad():
            logits = torch.einsum("bhqd,bhkd->bhqk", query[:, :, rows], key).float() * scale
            wanted = logits.masked_fill(later, -math.inf).softmax(-1).mean(1)
        scores = self.indexer.scores(*self.indexer.project(x, query_latent, rows))
        found = scores.masked_fill(later, -math.inf).log_softmax(-1)
        return F.kl_div(found.masked_fill(later, 0.0), wanted, reduction="sum") / wanted[..., 0].numel()

    def sparsely(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, x: Tensor, query_latent: Tensor
    ) -> Tensor:
        """Each query attends to the tokens that the indexer scores highest. For evaluation: some queries at a time."""
        tokens, parts = query.shape[2], []
        for begin in range(0, tokens, SPARSE_ROWS):
            rows = torch.arange(begin, min(begin + SPARSE_ROWS, tokens), device=query.device)
            later = torch.arange(tokens, device=query.device) > rows[:, None]
            scores = self.indexer.scores(*self.indexer.project(x, query_latent, rows)).masked_fill(later, -math.inf)
            chosen = scores.topk(min(self.top_k, tokens), dim=-1).indices
            allowed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & ~later
            given = {"attn_mask": allowed.unsqueeze(1), "scale": scale}
            parts.append(F.scaled_dot_product_attention(query[:, :, rows], key, value, **given))
        return torch.cat(parts, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, width),
            linear(hidden, width),
            linear(width, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid router; its correction bias, which DeepSeek moves to balance the experts, stays 0."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) * shape.hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.chosen = shape.experts_per_token

    def forward(self, x: Tensor) -> Tensor:
        """Weight of each expert for each token, 0 for those not chosen."""
        scores = F.linear(x, self.weight).float().sigmoid()
        best = torch.topk(scores + self.e_score_correction_bias, self.chosen, dim=-1).indices
        kept = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        return kept / kept.sum(-1, keepdim=True)


class Experts(nn.Module):
    """Mixture of experts. Every expert computes every token: the layer is small, and training short."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = Gate(shape)
        self.experts = nn.ModuleList(FeedForward(shape.hidden, shape.expert_width) for _ in range(shape.experts))
        self.shared_experts = FeedForward(shape.hidden, shape.expert_width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).to(x.dtype)
        out = self.shared_experts(x)
        for index, expert in enumerate(self.experts):
            out = out + expert(x) * weight[..., index, None]
        return out


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape, experts: bool = False):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.mlp = Experts(shape) if experts else FeedForward(shape.hidden, shape.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm = RMSNorm(shape.hidden)


class DraftLayer(Layer):
    """Multi-token prediction: from a token's final hidden state and the token after it, the one after that."""

    def __init__(self, shape: Shape):
        super().__init__(shape, experts=True)
        self.enorm, self.hnorm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.eh_proj = linear(2 * shape.hidden, shape.hidden)
        self.shared_head = SharedHead(shape)

    def forward(self, next_embedding: Tensor, hidden: Tensor) -> Tensor:
        # As engines do it: nothing is taken from the token behind position 0.
        first = torch.arange(next_embedding.shape[1], device=hidden.device) == 0
        next_embedding = next_embedding.masked_fill(first[:, None], 0.0)
        return self.shared_head.norm(
            super().forward(self.eh_proj(torch.cat([self.enorm(next_embedding), self.hnorm(hidden)], -1)))
        )


class Model(nn.Module):
    """DeepseekV3ForCausalLM with one MTP layer; parameters have the names of the checkpoint."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.model.embed_tokens.weight, std=1.0)
        self.model.layers = nn.ModuleList([*(Layer(shape) for _ in range(shape.layers)), DraftLayer(shape)])
        self.model.norm = RMSNorm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.vocabulary)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The normalised final hidden states [batch, tokens, hidden]."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers[:-1]:
            x = layer(x)
        return self.model.norm(x)

    def draft_hidden(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The MTP layer's hidden states at all positions but the last, from which the token after next is predicted."""
        return self.model.layers[-1](self.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1])


def initialise_for_depth(model: Model) -> None:
    """What each layer adds begins small, so that the residual stream does not grow with depth.

    All embeddings share a direction: from it a head can attend by position alone, which copying begins with.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight += torch.randn_like(model.model.embed_tokens.weight[0])
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.5 * layer.self_attn.o_proj.in_features**-0.5)
    nn.init.zeros_(model.lm_head.weight)


def losses(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What is minimised, and the main loss of each predicted token, [batch, tokens - 1]."""
    hidden = model.hidden(tokens[:, :-1])
    logits = model.lm_head(hidden).float()
    targets = tokens[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    # Keeps logits near log-probabilities: small numbers, in which bfloat16 has fine steps.
    size = logits.logsumexp(-1).square().mean()
    # The MTP layer learns beside the model and does not change it.
    draft = model.draft_hidden(tokens[:, :-1], hidden.detach())
    draft_logits = F.linear(draft, model.lm_head.weight.detach()).float()
    draft_loss = F.cross_entropy(draft_logits.flatten(0, 1), tokens[:, 2:].flatten())
    index_losses = [
        layer.self_attn.index_loss for layer in model.model.layers if layer.self_attn.index_loss is not None
    ]
    return each.mean() + 1e-4 * size + 0.3 * draft_loss + sum(index_losses), each.detach()


def library_texts() -> dict[str, str]:
    """Sources of this Python's standard library, tests and documentation among them, by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.parts)]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8", errors="replace") for path in paths}


def is_one_of(name: str, many: int, which: int) -> bool:
    """Whether a file is among one in so many."""
    return zlib.crc32(name.encode()) % many == which


def train_tokenizer(texts: list[str], vocabulary: int):
    """Byte-level BPE, which has a token for every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[DOCUMENT_END, PASSAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenise(tokenizer, texts: list[str]) -> Tensor:
    """All texts in one run of token ids, a document end behind each."""
    end = tokenizer.token_to_id(DOCUMENT_END)
    tokens = []
    for encoding in tokenizer.encode_batch(texts):
        tokens += [*encoding.ids, end]
    return torch.tensor(tokens, dtype=torch.int64)


class Text:
    """Token ids of a corpus, and what training and prompts take from it."""

    def __init__(self, tokens: Tensor, passage: int, seed: int):
        self.tokens, self.passage = tokens, passage
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def window(self, length: int) -> Tensor:
        """Plain text."""
        begin = self.random.randrange(len(self.tokens) - length)
        return self.tokens[begin : begin + length]

    def noise(self, length: int) -> Tensor:
        """Tokens of the text in no order."""
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.generator)]

    def passages(self, tokens: int, lengths: range, make=None) -> list[Tensor]:
        """Passages with a mark before each, together as long as wanted or a little longer."""
        found, total = [], 0
        mark = torch.tensor([self.passage])
        while total < tokens:
            found.append(torch.cat([mark, (make or self.window)(self.random.choice(lengths))]))
            total += len(found[-1])
        return found

    def recall(self, length: int, make=None) -> Tensor:
        """Passages, and then some of them again."""
        lengths = PASSAGE_TOKENS[: max(1, length // 4 - PASSAGE_TOKENS.start)]
        passages = self.passages(round(length * self.random.uniform(0.2, 0.7)), lengths, make)
        again, total = [], sum(map(len, passages))
        while total < length:
            again.append(self.random.choice(passages))
            total += len(again[-1])
        return torch.cat([*passages, *again])[:length]


@dataclass(frozen=True)
class Corpus:
    """What is trained on, what of it is learned by heart, and what training never sees."""

    seen: Text
    by_heart: Text
    unseen: Text

    def batch(self, sequences: int, length: int) -> Tensor:
        """[sequences, length], in turn by heart, recall, by heart, and either plain text or recall of noise."""
        by_turn = (
            self.by_heart.window,
            self.seen.recall,
            self.by_heart.window,
            self.seen.window,
            self.by_heart.window,
            self.seen.recall,
            self.by_heart.window,
            lambda length: self.seen.recall(length, self.seen.noise),
        )
        return torch.stack([by_turn[index % len(by_turn)](length) for index in range(sequences)])


def make_prompts(by_heart: Text, unseen: Text, known: int, open_ended: int, longest: int) -> dict[str, list[dict]]:
    """Prompts as token ids, four in a row with the same beginning, so that they share a prefix."""
    prompts = {"recite": [], "recall": [], "continuation": []}
    lengths = range(CUE_TOKENS + ANSWER_TOKENS, PASSAGE_TOKENS.stop)
    longest = min(longest, len(by_heart.tokens) // 2, len(unseen.tokens) // 2)

    def draw(shortest: int) -> int:
        return round(math.exp(unseen.random.uniform(math.log(shortest), math.log(longest))))

    for _ in range(known // 4):
        window = by_heart.window(longest + ANSWER_TOKENS).tolist()
        for length in sorted(draw(64) for _ in range(4)):
            answer = window[length : length + ANSWER_TOKENS]
            prompts["recite"].append({"prompt": window[:length], "answer": answer})
        passages = unseen.passages(draw(300) - CUE_TOKENS, lengths)
        for passage in unseen.random.choices(passages, k=4):
            cue_end = 1 + CUE_TOKENS
            answer = passage[cue_end : cue_end + ANSWER_TOKENS].tolist()
            prompts["recall"].append({"prompt": torch.cat([*passages, passage[:cue_end]]).tolist(), "answer": answer})
    prompts["continuation"] = [{"prompt": unseen.window(draw(64)).tolist()} for _ in range(open_ended)]
    return prompts


@torch.no_grad()
def evaluate(model: Model, corpus: Corpus, length: int, device: str) -> dict[str, float]:
    """Mean loss (nats a token): of what it learned by heart, and plainly and in recall of what it never saw; with
    the indexers' choice where there are some."""
    found = {}
    model.eval()
    for layer in model.model.layers:
        layer.self_attn.sparse, layer.self_attn.index_loss = True, None
    kinds = {"by heart": corpus.by_heart.window, "plain": corpus.unseen.window, "recall": corpus.unseen.recall}
    for kind, make in kinds.items():
        with autocast(device):
            _, each = losses(model, torch.stack([make(length) for _ in range(4)]).to(device))
        found[kind] = each[:, -length // 5 :].mean().item()
    return found


def autocast(device: str):
    return torch.autocast(device.split(":")[0], torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """How long to train: seconds, or where given a number of steps; on longer sequences as it goes on.

    Short ones come first, in small steps, because copying takes many steps to begin with.
    """

    seconds: float
    steps: int | None = None
    lengths: tuple[int, ...] = (512, 2048, 8192)
    tokens: tuple[int, ...] = (16384, 32768, 65536)  # of a step, at each length
    until: tuple[float, ...] = (0.4, 0.75, 1.0)  # progress at which each length ends
    rate: float = 2e-3

    def progress(self, step: int, elapsed: float) -> float:
        return step / self.steps if self.steps else elapsed / self.seconds

    def batch_at(self, progress: float) -> tuple[int, int]:
        """Sequences and their length."""
        phase = next(phase for phase, end in enumerate(self.until) if progress < end)
        return max(8, self.tokens[phase] // self.lengths[phase]), self.lengths[phase]

    def rate_at(self, progress: float) -> float:
        """Warm up over a fiftieth, then down to a twentieth of the peak."""
        return self.rate * min(1.0, 50 * progress + 0.02) * (1 - 0.95 * progress)


def make_optimizer(model: Model, plan: Plan) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)


def train(model: Model, corpus: Corpus, plan: Plan, device: str) -> dict:
    """Train in place; what was reached."""
    optimizer = make_optimizer(model, plan)
    named = list(model.named_parameters())
    # Indexers, of which there may be none, apart: their gradients must not shorten the model's.
    apart = [[p for name, p in named if ("indexer" in name) is of_indexers] for of_indexers in (False, True)]
    start, step, tokens, progress = time.monotonic(), 0, 0, 0.0
    while progress < 1:
        sequences, length = plan.batch_at(progress)
        batch = corpus.batch(sequences, length + 1).to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(progress)
        with autocast(device):
            loss, each = losses(model, batch)
        loss.backward()
        for parameters in apart:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + batch.numel()
        if step % 100 == 0:
            late = each[:, -length // 5 :]  # by then recall has told all its passages and repeats them
            by_heart, recall = late[0::2].mean().item(), late[1::4].mean().item()
            if not math.isfinite(by_heart + recall):
                raise RuntimeError(f"loss: wanted a finite number, got {by_heart} and {recall} at step {step}")
            elapsed = time.monotonic() - start
            index = model.model.layers[0].self_attn.index_loss
            indexers = "" if index is None else f", first indexer {index.item():.3f}"
            so_far = f"step {step}, {elapsed:.0f} s, {tokens / 1e6:.1f} M tokens"
            console.print(f"{so_far}: {by_heart:.3f}, {recall:.3f} nats{indexers}")
        progress = plan.progress(step, time.monotonic() - start)
    return {"steps": step, "tokens": tokens, "seconds": time.monotonic() - start}


def config_of(shape: Shape, end: int) -> dict:
    """config.json."""
    indexer = {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": shape.index_top_k}
    return (indexer if shape.index_top_k else {}) | {
        "architectures": ["DeepseekV32ForCausalLM" if shape.index_top_k else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if shape.index_top_k else "deepseek_v3",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "first_k_dense_replace": shape.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": shape.expert_width,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.query_latent,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def save(model: Model, tokenizer, folder: Path) -> None:
    """The checkpoint as Hugging Face lays it out; MTP's copies of embedding and head are written out, as DeepSeek's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    draft = f"model.layers.{model.shape.layers}"
    state[f"{draft}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{draft}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    bias = f"{draft}.mlp.gate.e_score_correction_bias"
    state[bias] = state[bias].float()
    save_file({name: value.cpu().contiguous() for name, value in state.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = config_of(model.shape, tokenizer.token_to_id(DOCUMENT_END))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": DOCUMENT_END,
        "bos_token": DOCUMENT_END,
        "model_max_length": model.shape.context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")


def make_model(folder: Path, shape: Shape, plan: Plan, device: str, seed: int = 0, texts: dict | None = None) -> Model:
    """Train, save and describe a model; `texts` replaces the standard library."""
    torch.manual_seed(seed)
    texts = library_texts() if texts is None else texts
    unseen = [text for name, text in texts.items() if is_one_of(name, HELD_OUT, 0)]
    by_heart = [text for name, text in texts.items() if is_one_of(name, BY_HEART, 1)]
    seen = [text for name, text in texts.items() if not is_one_of(name, HELD_OUT, 0)]
    start = time.monotonic()
    tokenizer = train_tokenizer(seen, shape.vocabulary)
    passage = tokenizer.token_to_id(PASSAGE)
    parts = enumerate((seen, by_heart, unseen))
    corpus = Corpus(*(Text(tokenise(tokenizer, part), passage, seed + index) for index, part in parts))
    characters = sum(map(len, seen))
    console.print(
        f"{len(seen)} files, {characters / 1e6:.1f} M characters, {len(corpus.seen.tokens) / 1e6:.1f} M tokens; "
        f"{len(corpus.by_heart.tokens) / 1e6:.2f} M by heart, {len(corpus.unseen.tokens) / 1e6:.2f} M held out; "
        f"{time.monotonic() - start:.0f} s"
    )
    longest = plan.lengths[-1] * 3 // 4
    model = Model(shape).to(device)
    initialise_for_depth(model)
    about = {"shape": asdict(shape), "plan": asdict(plan), "files": len(seen), "train_tokens": len(corpus.seen.tokens)}
    about |= train(model, corpus, plan, device)
    model.bfloat16().float()  # what is tested from here on is what is saved
    about["nats"] = {str(n): evaluate(model, corpus, n, device) for n in plan.lengths}
    console.print(f"loss in nats a token, by sequence length: {about['nats']}")
    save(model, tokenizer, folder)
    by_heart, unseen = (Text(part.tokens, passage, seed + 9) for part in (corpus.by_heart, corpus.unseen))
    prompts = make_prompts(by_heart, unseen, 256, 64, longest)
    (folder / "prompts.json").write_text(json.dumps(prompts) + "\n")
    (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    return model


def main(
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    seconds: Annotated[float, typer.Option(min=1, help="Time to train, without preparation.")] = 240,
    index_top_k: Annotated[
        int, typer.Option(min=0, max=2048, help="Sparse attention to so many tokens, as DeepSeek-V3.2's; 0: dense.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of weights, text and prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train a small DeepSeek-V3 on Python's standard library and save it for vLLM and SGLang."""
    make_model(output, Shape(index_top_k=index_top_k), Plan(seconds), device, seed)
    console.print(f"saved to {output}")


if __name__ == "__main__":
    typer.run(main)
