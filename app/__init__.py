"""Echo2: rents cheap GPUs and runs RL post-training of language models on them."""

__version__ = "0.1.0"
