"""The prompts of the trained model: their answers are what the text says, and they share prefixes."""

import json

import torch

from bench.qualify import train_model


def test_prompts_have_their_answers_and_share_prefixes():
    by_heart, unseen = (train_model.Text(torch.randperm(20_000), passage=30_000, seed=1) for _ in range(2))
    prompts = train_model.make_prompts(by_heart, unseen, known=8, open_ended=3, longest=2000)
    assert [len(entries) for entries in prompts.values()] == [8, 8, 3]
    tokens = by_heart.tokens.tolist()
    for entry in prompts["recite"]:
        begin = tokens.index(entry["prompt"][0])
        assert tokens[begin:][: len(entry["prompt"]) + train_model.ANSWER_TOKENS] == entry["prompt"] + entry["answer"]
    shorter, longer = (prompts["recite"][i]["prompt"] for i in (0, 1))
    assert longer[: len(shorter)] == shorter
    for entry in prompts["recall"]:
        prompt, cue = entry["prompt"], [30_000, *entry["prompt"][-train_model.CUE_TOKENS :]]
        first = next(i for i in range(len(prompt)) if prompt[i : i + len(cue)] == cue)
        assert first + len(cue) < len(prompt) and prompt[first + len(cue) :][: len(entry["answer"])] == entry["answer"]
        assert len(entry["answer"]) == train_model.ANSWER_TOKENS
    a, b = (prompts["recall"][i]["prompt"] for i in (0, 1))
    shared = -(train_model.CUE_TOKENS + 1)
    assert a[:shared] == b[:shared] and len(a) >= 300
    assert json.dumps(prompts)


def test_recall_sequences_repeat_what_they_held():
    text = train_model.Text(torch.arange(100_000), passage=100_001, seed=0)
    sequence = text.recall(2048)
    assert len(sequence) == 2048
    tokens, counts = sequence.unique(return_counts=True)
    assert (counts[tokens < 100_001] > 1).float().mean() > 0.1
