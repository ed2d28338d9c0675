"""ETAP in vLLM: `registration` is its plugin."""
