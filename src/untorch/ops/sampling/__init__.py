"""``untorch::choose_tokens``: a token for each row of logits, on a GPU."""
