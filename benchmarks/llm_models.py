"""Language models of cpu_llm.py: untorch packages, GGUF files, OpenVINO's IR, prompts, eager logits (needs torch).

Sizes are those of published models; weights are random, from a seed, rounded to bfloat16. All files come from the same
weights. References are logits of eager float32 with the dequantised weights of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
from common import ROOT, WORK
from llm_runtimes import POSITIONS
from models import package_fingerprint

DECODE, PREFILL = "decode", "prefill"
PROMPT = {DECODE: 32, PREFILL: 512}  # tokens
TOKENS = {DECODE: 64, PREFILL: 1}  # generated behind the prompt


@dataclass(frozen=True)
class Size:
    """label: in tables. kind: of architecture, in transformers. config: of transformers."""

    label: str
    kind: str
    config: Mapping[str, Any]

    @property
    def gguf_kind(self) -> str:
        """Of architecture, in GGUF."""
        return self.kind.replace("_", "")

    @property
    def share_of_experts(self) -> float:
        """Of the experts' weights, what a token reads."""
        return float(self.config.get("num_experts_per_tok", 0) / self.config.get("num_experts", 1))


SIZES = {
    "qwen3_0.6b": Size("Qwen3-0.6B", "qwen3", {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    }),
    "llama3.2_1b": Size("Llama-3.2-1B", "llama", {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    }),
    # Layers of Qwen3-30B-A3B, fewer, with a quarter of the experts.
    "qwen3_moe": Size("Qwen3-MoE, 4 layers", "qwen3_moe", {
        "vocab_size": 32_768, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """An untorch package.

    quantize, int8_activations: as ``causal_lm`` takes them. dtype: of activations, scales, keys and values.
    """

    label: str
    quantize: Mapping[str, Any]
    int8_activations: bool = True
    dtype: str = "bfloat16"


INT4 = {"dtype": "int4", "group_size": 32, "method": "rtn", "embeddings": True}
# Another variant is another line.
VARIANTS = {
    "int4": Variant("untorch, int4", INT4),
    "int4symmetric": Variant("untorch, int4, symmetric", INT4 | {"method": "symmetric"}),
    "int4float": Variant("untorch, int4, float activations", INT4, int8_activations=False),
    "int8": Variant("untorch, int8", {"dtype": "int8", "embeddings": True}),
    "nvfp4": Variant("untorch, NVFP4", {"dtype": "nvfp4", "method": "rtn"}),
}
_NOT_OF_EXPERTS = ("int8",)
GGUF = {"q4_0": "Q4_0", "q8_0": "Q8_0"}


def variants(size: str) -> dict[str, Variant]:
    """Those of a size; experts have no int8."""
    experts = SIZES[size].share_of_experts
    return {name: v for name, v in VARIANTS.items() if not (experts and name in _NOT_OF_EXPERTS)}


# The interpreter that has llama-cpp-python and openvino-genai.
PYTHON = os.environ.get("UNTORCH_BENCH_LLM_PYTHON", sys.executable)


def llm_case(size: str, work: str) -> str:
    """The name of a case of cpu_llm.py; its prompt is in ``<name>.npz``."""
    return f"llm_{size}_{work}"


def package_file(size: str, variant: str) -> str:
    """An untorch package, below WORK."""
    return f"llm_{size}_{variant}.pt2"


def gguf_file(size: str, form: str) -> str:
    """A GGUF file, below WORK, in a folder of its own: OpenVINO writes its IR beside it."""
    return f"llm_{size}_{form}/model.gguf"


def openvino_folder(size: str, form: str) -> str:
    """OpenVINO's IR of a GGUF file, below WORK."""
    return f"llm_{size}_{form}"


def reference_file(size: str, file: str) -> pathlib.Path:
    """Logits behind each prompt, of eager float32 with the weights of one file ("float32": the weights as they are)."""
    return WORK / f"llm_{size}_logits_{file}.npz"


def facts_file(size: str) -> pathlib.Path:
    """Parameters, and the bytes of weights that a token reads, by file."""
    return WORK / f"llm_{size}.json"


def wanted() -> list[str]:
    """The sizes to measure: those that UNTORCH_BENCH_MODELS names, or all."""
    names = os.environ.get("UNTORCH_BENCH_MODELS", "").split() or list(SIZES)
    if unknown := [name for name in names if name not in SIZES]:
        raise SystemExit(f"UNTORCH_BENCH_MODELS: expected names of {', '.join(SIZES)}, got {', '.join(unknown)}")
    return names


def has_module(name: str) -> bool:
    """Whether that interpreter has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


def version(distribution: str) -> str:
    """Of a package in that interpreter."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([PYTHON, "-c", code], check=False, capture_output=True, text=True)
    return done.stdout.strip() or "not installed"


def build() -> None:
    """All files of the sizes that are wanted, each size in a process of its own: its memory is free afterwards.

    Files that are up to date are kept. With UNTORCH_BENCH_KEEP=1 so are packages of another state of untorch.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    for size in wanted():
        subprocess.run([sys.executable, str(pathlib.Path(__file__)), size], check=True)


@dataclass
class Builder:
    """One size. model: in float32. kept: its weights in bfloat16, which they are exactly representable in."""

    size: str
    model: Any
    kept: dict[str, Any]
    prompts: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, size: str) -> Builder:
        """Random weights, and two random prompts."""
        import torch
        import transformers

        torch.manual_seed(0)
        spec = SIZES[size]
        options = {"max_position_embeddings": POSITIONS, "tie_word_embeddings": True, "attention_bias": False}
        rope = {"rope_type": "default", "rope_theta": spec.config["rope_theta"]}
        given = {key: value for key, value in spec.config.items() if key != "rope_theta"}
        config = transformers.AutoConfig.for_model(spec.kind, **given, **options, rope_parameters=rope)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        kept = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kept[name] = parameter.to(torch.bfloat16)
                parameter.copy_(kept[name])
        prompts = {work: torch.randint(1000, spec.config["vocab_size"], (1, PROMPT[work])) for work in PROMPT}
        for work, prompt in prompts.items():
            numpy.savez(WORK / f"{llm_case(size, work)}.npz", prompt=prompt[0].numpy(), tokens=TOKENS[work])
        return cls(size, model, kept, prompts)

    def refer(self, file: str, weights: Callable[[str], Any] | None = None) -> None:
        """Write the logits of the model with these weights, None where they stay."""
        import torch

        self.model.float()
        self._set(weights)
        with torch.no_grad():
            logits = {
                work: self.model(prompt, use_cache=False, logits_to_keep=1).logits[0, -1].numpy()
                for work, prompt in self.prompts.items()
            }
        numpy.savez(reference_file(self.size, file), **logits)

    def _set(self, weights: Callable[[str], Any] | None = None) -> None:
        """The weights as they are, but for those that the function has others for."""
        import torch

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                found = None if weights is None else weights(name)
                parameter.copy_(self.kept[name] if found is None else found)

    def count(self) -> dict[str, Any]:
        """Parameters that a token meets in the layers, and in the tied table, which is the last layer as well."""
        matrices = {name: round(w.numel() * self._share(name)) for name, w in self.kept.items() if w.dim() >= 2}
        table = sum(count for name, count in matrices.items() if "embed_tokens" in name)
        return {"layers": sum(matrices.values()) - table, "head": table, "bytes": {}}

    def _share(self, name: str) -> float:
        """Of a tensor, what a token reads."""
        return SIZES[self.size].share_of_experts if ".experts." in name else 1.0

    def gguf(self, form: str) -> None:
        """A GGUF file with all matrices in one type, its bytes, and the reference."""
        import gguf
        import torch

        path = WORK / gguf_file(self.size, form)
        path.parent.mkdir(exist_ok=True)
        kind = gguf.GGMLQuantizationType[GGUF[form]]
        packed: dict[str, Any] = {}
        writer = gguf.GGUFWriter(path, SIZES[self.size].gguf_kind)
        describe(writer, self.size, kind)
        arch = gguf.MODEL_ARCH[SIZES[self.size].gguf_kind.upper()]
        names = gguf.get_tensor_name_map(arch, SIZES[self.size].config["num_hidden_layers"])
        read = 0.0
        for name, weight in self.kept.items():
            values = self._permute(name, weight.float().numpy())
            if values.ndim == 3:  # experts
                data = packed[name] = gguf.quants.quantize(values, kind)
                block = name.partition(".layers.")[2].partition(".")[0]
                half = data.shape[1] // 2
                parts = {"down": data} if "down_proj" in name else {"gate": data[:, :half], "up": data[:, half:]}
                for part, own in parts.items():
                    writer.add_tensor(f"blk.{block}.ffn_{part}_exps.weight", own.copy(), raw_dtype=kind)
            elif values.ndim == 2 and not name.endswith(".mlp.gate.weight"):
                data = packed[name] = gguf.quants.quantize(values, kind)
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
            else:  # norms and routers
                data = values
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data)
            read += data.nbytes * self._share(name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.facts["bytes"][form] = round(read)

        def weights(name: str) -> Any:
            if name not in packed:
                return None
            return torch.from_numpy(self._permute(name, gguf.quants.dequantize(packed[name], kind), back=True))

        self.refer(form, weights)

    def _permute(self, name: str, values: Any, back: bool = False) -> Any:
        """GGUF's Llama has the rotary pairs of queries and keys side by side, transformers in two halves."""
        spec = SIZES[self.size]
        if spec.kind != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        half = spec.config["head_dim"] // 2
        inner = (half, 2) if back else (2, half)
        return values.reshape(-1, *inner, values.shape[1]).swapaxes(1, 2).reshape(values.shape)

    def refer_to_variant(self, variant: str) -> None:
        """The reference of an untorch package: its layers, quantised here and dequantised to float32."""
        import copy

        import torch

        from untorch.quant import quantize

        options = dict(VARIANTS[variant].quantize)
        dtype = getattr(torch, VARIANTS[variant].dtype)
        self._set()
        own = copy.deepcopy(self.model).to(dtype)
        quantize(own, options.pop("dtype"), **options)
        layers = dict(own.named_modules())
        # Tied ones are read once. Of an embedding that the head does not share, a token reads a row.
        tensors = {t.data_ptr(): (name, t) for name, t in (*own.named_parameters(), *own.named_buffers())}
        if hasattr(own.lm_head, "dequantize") and not hasattr(own.get_input_embeddings(), "dequantize"):
            del tensors[own.get_input_embeddings().weight.data_ptr()]
        read = sum(t.numel() * t.element_size() * self._share(name) for name, t in tensors.values())
        self.facts["bytes"][variant] = round(read)

        def weights(name: str) -> Any:
            if ".experts." in name:
                experts = layers[name.rpartition(".")[0]]
                return experts.dequantize()["down_proj" in name] if hasattr(experts, "dequantize") else None
            layer = layers[name.removesuffix(".weight")]
            return layer.dequantize() if hasattr(layer, "dequantize") else None

        self.refer(variant, weights)

    def export(self, variant: str) -> None:
        """An untorch package."""
        import torch

        from untorch.export import causal_lm

        choice = VARIANTS[variant]
        self._set()
        causal_lm(
            self.model.to(getattr(torch, choice.dtype)), WORK / package_file(self.size, variant),
            quantize=dict(choice.quantize), int8_activations=choice.int8_activations, cpu="native", progress=False,
        )  # fmt: skip


def describe(writer: Any, size: str, kind: Any) -> None:
    """The metadata of a GGUF file, with a vocabulary of names."""
    import gguf

    config = SIZES[size].config
    writer.add_name(SIZES[size].label)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    letters = sorted(_byte_letters())
    tokens = [*letters, *(f"<{i}>" for i in range(config["vocab_size"] - len(letters)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if SIZES[size].kind == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _byte_letters() -> Iterator[str]:
    """A printable letter for each byte, as GPT-2's tokenizer has them."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    for value in sorted(kept):
        yield chr(value)
    for i in range(256 - len(kept)):
        yield chr(256 + i)


def _step(label: str, work: Callable[[], Any]) -> None:
    start = time.perf_counter()
    print(f"  {label} …", end="", file=sys.stderr, flush=True)
    work()
    print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def _openvino(size: str, form: str) -> None:
    command = [PYTHON, str(ROOT / "benchmarks" / "llm_runtimes.py"), str(WORK / gguf_file(size, form))]
    subprocess.run(command, check=True)


def build_size(size: str) -> None:
    """All files of one size. Those of other runtimes depend on its weights alone, packages on untorch as well."""
    own = hashlib.sha256(repr((SIZES[size], PROMPT, POSITIONS, GGUF)).encode()).hexdigest()
    keep = os.environ.get("UNTORCH_BENCH_KEEP", "") == "1"
    of_untorch = "kept" if keep else package_fingerprint(__file__, "torch", "transformers")
    stamp = WORK / f"llm_{size}.stamp.json"
    built: dict[str, str] = json.loads(stamp.read_text()) if stamp.exists() else {}

    def attempt(name: str, key: str, label: str, work: Callable[[], Any]) -> None:
        if built.get(name) != key and not (keep and name in built):
            _step(f"{SIZES[size].label}, {label}", work)
            built[name] = key
            stamp.write_text(json.dumps(built, indent=1) + "\n")

    builders: list[Builder] = []

    def run(work: Callable[[Builder], Any]) -> None:
        """With the model, which is made once, if anything is missing."""
        path = facts_file(size)
        if not builders:
            builders.append(Builder.make(size))
            builders[0].facts = json.loads(path.read_text()) if "float32" in built else builders[0].count()
        work(builders[0])
        path.write_text(json.dumps(builders[0].facts, indent=1) + "\n")

    attempt("float32", own, "eager", lambda: run(lambda builder: builder.refer("float32")))
    for form, kind in GGUF.items():
        attempt(form, own, f"GGUF {kind}", partial(run, partial(Builder.gguf, form=form)))
    for name in variants(size):
        work = partial(Builder.refer_to_variant, variant=name)
        attempt(f"{name} reference", own + of_untorch, f"{name}, eager", partial(run, work))
    for name in variants(size):
        attempt(name, own + of_untorch, f"{name}, untorch", partial(run, partial(Builder.export, variant=name)))
    if has_module("openvino_genai") and not SIZES[size].share_of_experts:  # its reader of GGUF has no experts
        for form, kind in GGUF.items():
            attempt(f"openvino {form}", own, f"OpenVINO's IR of {kind}", partial(_openvino, size, form))


if __name__ == "__main__":
    build_size(sys.argv[1])
