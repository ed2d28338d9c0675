"""`etap plan`: what a model needs on a number of GPUs, and what ETAP gains there."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from etap_backend.plan.alternatives import make_plan, what_fits
from etap_backend.plan.deployment import Deployment, cache_named
from etap_backend.plan.drafts import with_drafts
from etap_backend.plan.files import parse_tokens
from etap_backend.plan.gpu import read_gpu
from etap_backend.plan.model import read_model
from etap_backend.plan.report import document, screen
from etap_backend.plan.shared import predict

FLAGS = {"model": "model", "gpus": "--count", "cache": "--kv-dtype", "rows": "--s-q x heads"}


def _tensor_parallel(count: int, over: int) -> int:
    """GPUs that data and pipeline parallelism leave."""
    if over > 0 and count % over:
        raise ValueError(f"gpus: wanted a multiple of --dp x --pp = {over}, got {count}")
    return max(1, count // max(1, over))


def run(options: argparse.Namespace) -> int:
    """Print the plan; gives 0, or 2 with the reason where there is none."""
    flags = dict(FLAGS)
    if options.tp is None:
        flags["tp"] = "--count" if options.dp * options.pp == 1 else "--count / (--dp x --pp)"
    try:
        model, gpu = read_model(options.model), read_gpu(options.gpu)
        tp = _tensor_parallel(options.count, options.dp * options.pp) if options.tp is None else options.tp
        context, cache = parse_tokens(options.context), cache_named(options.kv_dtype, model)
        layout = (options.count, tp, options.dp, options.pp, options.dcp)
        on = Deployment(*layout, cache, context, options.batch, options.s_q, options.utilization)
        made = make_plan(model, gpu, on, options.attention_share)
        if options.shared_prefix is not None:
            tokens = parse_tokens(options.shared_prefix, "shared_prefix")
            made = replace(made, shared=predict(model, gpu, on, made, tokens))
        found = what_fits(model, gpu, on, options.attention_share)
        drafted = None
        if options.drafts or options.acceptance is not None:
            drafted = with_drafts(model, gpu, on, options.acceptance, options.attention_share)
    except (ValueError, ImportError) as error:  # the compiled library says how it groups query rows
        name, colon, reason = str(error).partition(": ")
        flag = flags.get(name) or f"--{name.replace('_', '-')}" if hasattr(options, name) or name in flags else name
        print(f"etap plan: {flag}{colon}{reason}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(document(options.model, model, gpu, on, made, found, drafted), indent=1, allow_nan=False))
        return 0
    print(screen(options.model, model, gpu, on, made, found, drafted))
    return 0
