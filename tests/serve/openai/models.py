"""Compiles the tests' language model: ``python models.py tiny PATH``."""

from __future__ import annotations

import pathlib
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Tools as Hermes and Qwen have them.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call by <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT))
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from tests.conformance.language_models import make_model, tokenizer
    from untorch.export import causal_lm

    model = make_model("Llama", max_position_embeddings=1024)
    model.generation_config.eos_token_id = 257
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(tokenizer()), eos_token="</s>")
    words.chat_template = TEMPLATE
    causal_lm(model, path, tokenizer=words, token_counts=(16,), progress=False)


if __name__ == "__main__":
    main(sys.argv[2])
