"""Exact backpropagation of Hugging Face causal language models, chunk by chunk."""

from streambp.config import StreamConfig
from streambp.loss import linear_cross_entropy, token_logprobs
from streambp.model import disable, enable

__all__ = ["StreamConfig", "disable", "enable", "linear_cross_entropy", "token_logprobs"]
