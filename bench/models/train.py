"""Trains a small real model of the DeepSeek-V3 architecture, whose right answers are known.

    python -m bench.models.train FOLDER [--seconds 240]

Needs torch, safetensors, tokenizers and a GPU with 40 GB; no network. The text is Python's standard library. Attention
has DeepSeek's dimensions (latent 512, rope 64, 16 heads as on one of 8 ranks); the rest is narrow.

Half of the training sequences come from a fortieth of the files, which the model learns by heart: how they go on is
then so certain that rounding in correct kernels does not change it, and a wrong kernel does. Three eighths are passages
of text or noise, some of them repeated, which teaches to answer from thousands of tokens back. FOLDER's prompts.json:

- recite: the beginning of a text learned by heart. The right answer is how it goes on.
- recall: passages of files that training never sees, and then the beginning of one of them. Likewise.

The main layers are dense, because routing turns rounding into jumps. The layer for multi-token prediction (MTP) has
experts, which engines expect; it only proposes tokens, so it changes no answer.
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
from torch import Tensor, nn

from bench.models import dummy

NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
ROPE_THETA = 10000.0
NORM_EPS = 1e-6
PASSAGE, DOCUMENT_END = "<|passage|>", "<|end|>"
HELD_OUT = 20  # one file of so many is for prompts only
BY_HEART = 40  # one file of so many is learned by heart
CUE_TOKENS, ANSWER_TOKENS = 24, 32
PASSAGE_TOKENS = range(16, 401)  # in training; in prompts long enough for cue and answer
LENGTHS = (512, 2048, 8192)  # of sequences; short ones first, because copying takes many steps to begin with
STEP_TOKENS = (16384, 32768, 65536)  # at each length
UNTIL = (0.4, 0.75, 1.0)  # progress at which each length ends
RATE = 2e-3


@dataclass(frozen=True)
class Shape:
    """What a miniature in a test may change; attention's own dimensions are fixed."""

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


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int):
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # torch has no fused form for two types


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of pairs of neighbouring elements of [batch, tokens, heads, 64]."""
    frequency = ROPE_THETA ** -(torch.arange(0, ROPE, 2, device=x.device, dtype=torch.float32) / ROPE)
    angle = torch.arange(x.shape[1], device=x.device).float()[:, None, None] * frequency
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """MLA with keys and values projected up from the latent."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.q_a_proj = linear(shape.hidden, shape.query_latent)
        self.q_a_layernorm = RMSNorm(shape.query_latent)
        self.q_b_proj = linear(shape.query_latent, shape.heads * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(shape.hidden, LATENT + ROPE)
        self.kv_a_layernorm = RMSNorm(LATENT)
        self.kv_b_proj = linear(LATENT, shape.heads * (NOPE + VALUE))
        self.o_proj = linear(shape.heads * VALUE, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, NOPE + ROPE))
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, NOPE + VALUE))
        k_nope, value = up.split([NOPE, VALUE], -1)
        k_rope = rotate(k_rope.unsqueeze(2)).expand(-1, -1, self.heads, -1)
        query = torch.cat([q_nope, rotate(q_rope)], -1).to(value.dtype)
        key = torch.cat([k_nope, k_rope.to(k_nope.dtype)], -1)
        value = F.pad(value, (0, NOPE + ROPE - VALUE))  # flash attention takes keys and values of one width only
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=(NOPE + ROPE) ** -0.5)
        return self.o_proj(out[..., :VALUE].transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Mixture of experts with a sigmoid router. Every expert computes every token: the layer is small, and training
    short. The correction bias, which balances experts in DeepSeek's models, stays 0."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate, self.chosen = linear(shape.hidden, shape.experts), shape.experts_per_token
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.experts = nn.ModuleList(FeedForward(shape.hidden, shape.expert_width) for _ in range(shape.experts))
        self.shared_experts = FeedForward(shape.hidden, shape.expert_width)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.gate.weight).float().sigmoid()
        best = scores.topk(self.chosen, dim=-1).indices
        used = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        weight = (used / used.sum(-1, keepdim=True)).to(x.dtype)
        chosen = (expert(x) * weight[..., index, None] for index, expert in enumerate(self.experts))
        return sum(chosen, self.shared_experts(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, experts: bool = False):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.mlp = Experts(shape) if experts else FeedForward(shape.hidden, shape.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftLayer(Layer):
    """Multi-token prediction: from a token's final hidden state and the next token, the token after that."""

    def __init__(self, shape: Shape):
        super().__init__(shape, experts=True)
        self.enorm, self.hnorm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.eh_proj = linear(2 * shape.hidden, shape.hidden)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(shape.hidden)})

    def forward(self, next_embedding: Tensor, hidden: Tensor) -> Tensor:
        # Engines mask the embedding at position 0.
        first = torch.arange(next_embedding.shape[1], device=hidden.device) == 0
        next_embedding = self.enorm(next_embedding.masked_fill(first[:, None], 0.0))
        x = super().forward(self.eh_proj(torch.cat([next_embedding, self.hnorm(hidden)], -1)))
        return self.shared_head["norm"](x)


class Model(nn.Module):
    """DeepseekV3ForCausalLM with one MTP layer; parameters have the checkpoint's names.

    What each layer adds begins small, so that the residual stream does not grow with depth. All embeddings share a
    direction, from which a head can attend by position only: copying begins with that.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.model = shape, nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.model.embed_tokens.weight, std=1.0)
        self.model.layers = nn.ModuleList([*(Layer(shape) for _ in range(shape.layers)), DraftLayer(shape)])
        self.model.norm = RMSNorm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.vocabulary)
        with torch.no_grad():
            self.model.embed_tokens.weight += torch.randn(shape.hidden)
        for layer in self.model.layers:
            nn.init.normal_(layer.self_attn.o_proj.weight, std=0.5 * layer.self_attn.o_proj.in_features**-0.5)
        nn.init.zeros_(self.lm_head.weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The normalised final hidden states [batch, tokens, hidden]."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers[:-1]:
            x = layer(x)
        return self.model.norm(x)

    def draft_hidden(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The MTP layer's hidden states at all positions but the last."""
        return self.model.layers[-1](self.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1])


def losses(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What training minimises, and the main loss of each predicted token, [batch, tokens - 1]."""
    hidden, targets = model.hidden(tokens[:, :-1]), tokens[:, 1:]
    logits = model.lm_head(hidden).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    # Keeps logits near log-probabilities: small numbers, in which bfloat16 has fine steps.
    size = logits.logsumexp(-1).square().mean()
    # The MTP layer learns beside the model and does not change it.
    draft = F.linear(model.draft_hidden(tokens[:, :-1], hidden.detach()), model.lm_head.weight.detach()).float()
    draft_loss = F.cross_entropy(draft.flatten(0, 1), tokens[:, 2:].flatten())
    return each.mean() + 1e-4 * size + 0.3 * draft_loss, each.detach()


def library_texts() -> dict[str, str]:
    """Sources of this Python's standard library by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.parts)]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8", errors="replace") for path in paths}


def train_tokenizer(texts: list[str], vocabulary: int):
    """Byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [DOCUMENT_END, PASSAGE]
    options = {"initial_alphabet": alphabet, "special_tokens": special, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    return tokenizer


def tokenise(tokenizer, texts: list[str]) -> Tensor:
    """Token ids of all texts, each with a document end."""
    end = tokenizer.token_to_id(DOCUMENT_END)
    return torch.tensor([token for one in tokenizer.encode_batch(texts) for token in (*one.ids, end)])


class Text:
    """Token ids of a corpus, and the sequences that training and prompts take from it."""

    def __init__(self, tokens: Tensor, passage: int, seed: int):
        self.tokens, self.passage = tokens, passage
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def window(self, length: int) -> Tensor:
        """Plain text."""
        begin = self.random.randrange(len(self.tokens) - length)
        return self.tokens[begin : begin + length]

    def noise(self, length: int) -> Tensor:
        """Tokens in no order."""
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.generator)]

    def passages(self, tokens: int, lengths: range, make=None) -> list[Tensor]:
        """Passages with a mark before each, `tokens` or a little more together."""
        found, total = [], 0
        while total < tokens:
            passage = (make or self.window)(self.random.choice(lengths))
            found.append(torch.cat([torch.tensor([self.passage]), passage]))
            total += len(found[-1])
        return found

    def recall(self, length: int, make=None) -> Tensor:
        """Passages, and then some of them again."""
        lengths = PASSAGE_TOKENS[: max(1, length // 4 - PASSAGE_TOKENS.start)]
        found = self.passages(round(length * self.random.uniform(0.2, 0.7)), lengths, make)
        first, total = len(found), sum(map(len, found))
        while total < length:
            found.append(self.random.choice(found[:first]))
            total += len(found[-1])
        return torch.cat(found)[:length]


@dataclass(frozen=True)
class Corpus:
    seen: Text
    by_heart: Text
    unseen: Text  # never trained on

    def batch(self, sequences: int, length: int) -> Tensor:
        """[sequences, length]: every second by heart, between them recall, plain text and recall of noise."""
        seen = self.seen
        others = (seen.recall, seen.window, seen.recall, lambda length: seen.recall(length, seen.noise))
        made = (others[i // 2 % 4] if i % 2 else self.by_heart.window for i in range(sequences))
        return torch.stack([make(length) for make in made])


def make_prompts(by_heart: Text, unseen: Text, count: int, longest: int) -> dict[str, list[dict]]:
    """Prompts and answers as token ids; four in a row share a prefix."""
    prompts = {"recite": [], "recall": []}
    lengths = range(CUE_TOKENS + ANSWER_TOKENS, PASSAGE_TOKENS.stop)
    longest = min(longest, len(by_heart.tokens) // 2, len(unseen.tokens) // 2)

    def draw(shortest: int) -> int:
        return round(math.exp(unseen.random.uniform(math.log(shortest), math.log(longest))))

    for _ in range(count // 4):
        window = by_heart.window(longest + ANSWER_TOKENS).tolist()
        for length in sorted(draw(64) for _ in range(4)):
            answer = window[length : length + ANSWER_TOKENS]
            prompts["recite"].append({"prompt": window[:length], "answer": answer})
        passages = unseen.passages(draw(300) - CUE_TOKENS, lengths)
        for passage in unseen.random.choices(passages, k=4):
            cue_end = 1 + CUE_TOKENS
            answer = passage[cue_end : cue_end + ANSWER_TOKENS].tolist()
            prompts["recall"].append({"prompt": torch.cat([*passages, passage[:cue_end]]).tolist(), "answer": answer})
    return prompts


def train(model: Model, corpus: Corpus, seconds: float, device: str, most_steps: float = math.inf) -> dict:
    """Train in place for so many seconds or steps; what was reached."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        phase = next(phase for phase, end in enumerate(UNTIL) if progress < end)
        length = min(LENGTHS[phase], model.shape.context)
        batch = corpus.batch(max(8, STEP_TOKENS[phase] // length), length + 1).to(device, non_blocking=True)
        for group in optimizer.param_groups:  # warm up over a fiftieth, then down to a twentieth
            group["lr"] = RATE * min(1.0, 50 * progress + 0.02) * (1 - 0.95 * progress)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            loss, each = losses(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        elapsed = time.monotonic() - start
        progress = max(elapsed / seconds, step / most_steps)
        if step % 100 == 0 or progress >= 1:
            late = each[:, -length // 5 :]  # by then recall repeats its passages
            nats = {"by heart": late[0::2].mean().item(), "recall": late[1::4].mean().item()}
            print(f"step {step}, {elapsed:.0f} s, nats per token: {nats}", flush=True)
            if not all(map(math.isfinite, nats.values())):
                raise RuntimeError(f"loss: wanted finite numbers, got {nats} at step {step}")
    return {"steps": step, "seconds": elapsed, "nats": nats}


def config_of(shape: Shape, end: int) -> dict:
    """config.json: DeepSeek-R1's with other widths, without FP8 and a longer context."""
    config = {key: value for key, value in dummy.shipped("deepseek-r1").items() if key != "quantization_config"}
    return config | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "first_k_dense_replace": shape.layers,
        "moe_intermediate_size": shape.expert_width,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "rope_scaling": None, "rope_interleave": True},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.heads, "q_lora_rank": shape.query_latent},
        **{"vocab_size": shape.vocabulary, "max_position_embeddings": shape.context},
        **{"bos_token_id": end, "eos_token_id": end},
    }


def save(model: Model, tokenizer, folder: Path) -> None:
    """The checkpoint in Hugging Face's layout; MTP has copies of embedding and head, as in DeepSeek's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    draft = f"model.layers.{model.shape.layers}"
    state[f"{draft}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{draft}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    bias = f"{draft}.mlp.gate.e_score_correction_bias"
    state[bias] = state[bias].float()
    state = {name: value.cpu().contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": DOCUMENT_END, "bos_token": DOCUMENT_END}
    about |= {"model_max_length": model.shape.context, "clean_up_tokenization_spaces": False}
    config = config_of(model.shape, tokenizer.token_to_id(DOCUMENT_END))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


def make_model(
    folder: Path, shape: Shape, seconds: float, device: str, seed: int = 0, texts: dict | None = None, **limits: float
) -> Model:
    """Train, save and describe a model; `texts` replaces the standard library."""
    torch.manual_seed(seed)
    texts = library_texts() if texts is None else texts
    numbered = [(zlib.crc32(name.encode()), text) for name, text in texts.items()]
    unseen = [text for number, text in numbered if number % HELD_OUT == 0]
    by_heart = [text for number, text in numbered if number % BY_HEART == 1]
    seen = [text for number, text in numbered if number % HELD_OUT]
    tokenizer = train_tokenizer(seen, shape.vocabulary)
    passage, parts = tokenizer.token_to_id(PASSAGE), [tokenise(tokenizer, part) for part in (seen, by_heart, unseen)]
    corpus = Corpus(*(Text(tokens, passage, seed + index) for index, tokens in enumerate(parts)))
    model = Model(shape).to(device)
    reached = train(model, corpus, seconds, device, **limits)
    save(model, tokenizer, folder)
    known = (Text(tokens, passage, seed + 9) for tokens in parts[1:])
    prompts = make_prompts(*known, count=256, longest=shape.context * 3 // 4)
    (folder / "prompts.json").write_text(json.dumps(prompts) + "\n")
    (folder / "training.json").write_text(json.dumps({"shape": asdict(shape), **reached}, indent=1) + "\n")
    return model


def main(
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    seconds: Annotated[float, typer.Option(min=1, help="Time to train, without preparation.")] = 240,
    seed: Annotated[int, typer.Option(help="Of weights, text and prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train a small DeepSeek-V3 on Python's standard library and save it for vLLM and SGLang."""
    make_model(output, Shape(), seconds, device, seed)


if __name__ == "__main__":
    typer.run(main)
