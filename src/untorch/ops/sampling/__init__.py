"""``untorch::choose_tokens`` and ``untorch::token_logprobs``: tokens and logprobs from rows of logits, on a GPU."""
