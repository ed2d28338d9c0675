"""The plugin's logger."""

from vllm.logger import init_logger

# vLLM gives its handler and level to loggers below "vllm" only.
logger = init_logger("vllm.etap_backend")
