"""What do int4, NVFP4 and int8 cost the layers of a real model that is wider than MiniLM, on real data?

AntiBERTy: BERT for antibodies, width 512 and 2048, 8 layers. PyPI's antiberty below 1.0 holds its weights (97 MB, 26
million parameters): pip install --no-deps "antiberty<1". The data are variable domains of three approved antibodies.

An error of a weight is the relative Frobenius norm. An error of a layer is that of its outputs without the bias, on the
inputs that it has in the float32 model; they differ, because inputs are not alike in all directions. The last columns
are of the whole model: cosine similarity of its last hidden states to float32's, for each residue, and residues whose
most probable amino acid changes. Nothing depends on the machine.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import pathlib
from collections import defaultdict
from typing import Any

import torch
from common import Report, Table, arguments
from torch import nn

from untorch.quant import quantize

# Heavy and light chain of trastuzumab, adalimumab and bevacizumab.
SEQUENCES = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
    "EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTYAADFKRRFTFSLDTSKSTAYLQMNSLRAEDTAVYYCAKYPHYYGSSHWYFDVWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCSASQDISNYLNWYQQKPGKAPKVLIYFTSSLHSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQYSTVPWTFGQGTKVEIK",
)
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int4, rtn, 128", {"dtype": "int4", "method": "rtn", "group_size": 128}),
    ("int4, hqq, 128", {"dtype": "int4", "method": "hqq", "group_size": 128}),
    ("int4, rtn, 32", {"dtype": "int4", "method": "rtn", "group_size": 32}),
    ("int4, hqq, 32", {"dtype": "int4", "method": "hqq", "group_size": 32}),
    ("nvfp4, rtn", {"dtype": "nvfp4", "method": "rtn"}),
    ("nvfp4, search", {"dtype": "nvfp4", "method": "search"}),
    ("int8", {"dtype": "int8"}),
)
KINDS = {
    "attention.self": "q, k, v",
    "attention.output": "attention out",
    "intermediate": "up",
    "output.dense": "down",
}


def folder() -> pathlib.Path:
    """Where the package keeps its weights; it is not imported, since it wants an older transformers."""
    spec = importlib.util.find_spec("antiberty")
    places = spec.submodule_search_locations if spec is not None else None
    found = pathlib.Path(places[0]) / "trained_models" if places else None
    if found is None or not found.is_dir():
        raise SystemExit('this benchmark needs the weights of antiberty: pip install --no-deps "antiberty<1"')
    return found


def load_model(place: pathlib.Path) -> Any:
    """transformers' BERT with a head for masked residues, in float32."""
    import transformers

    config = json.loads((place / "AntiBERTy_md_smooth" / "config.json").read_text())
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**config, "tie_word_embeddings": False}))
    state = torch.load(place / "AntiBERTy_md_smooth" / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(state, strict=False)
    if missing:
        raise SystemExit(f"antiberty's weights lack {missing}")
    return model.eval().requires_grad_(False)


def tokens(place: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of the sequences, padded."""
    number = {word: i for i, word in enumerate((place / "vocab.txt").read_text().split())}
    rows = [[number["[CLS]"], *(number[residue] for residue in text), number["[SEP]"]] for text in SEQUENCES]
    width = max(map(len, rows))
    ids = torch.tensor([row + [number["[PAD]"]] * (width - len(row)) for row in rows])
    return ids, (ids != number["[PAD]"]).long()


def kind_of(name: str) -> str | None:
    return next((kind for part, kind in KINDS.items() if f".{part}." in f".{name}."), None)


class Quality:
    """The model, what goes into its layers, and what comes out of it."""

    def __init__(self, quick: bool) -> None:
        place = folder()
        self.model = load_model(place)
        self.ids, self.mask = tokens(place)
        if quick:
            self.ids, self.mask = self.ids[:1], self.mask[:1]
        self.inputs: dict[str, torch.Tensor] = {}
        self.kept = self.mask.bool()
        hooks = []
        for name, part in self.model.bert.encoder.named_modules():
            if isinstance(part, nn.Linear):

                def keep(_: nn.Module, given: tuple[torch.Tensor], name: str = name) -> None:
                    self.inputs[name] = given[0][self.kept]

                hooks.append(part.register_forward_pre_hook(keep))
        self.states, self.logits = self.run(self.model)
        for hook in hooks:
            hook.remove()

    def run(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states and logits of every token."""
        with torch.no_grad():
            found = model(input_ids=self.ids, attention_mask=self.mask, output_hidden_states=True)
        return found.hidden_states[-1][self.kept], found.logits[self.kept]

    def values(self, **options: Any) -> dict[str, Any]:
        """The errors of a copy that is quantised so."""
        quantised = copy.deepcopy(self.model)
        encoder = quantised.bert.encoder
        report = quantize(encoder, progress=False, **options)
        weights, layers = defaultdict(list), defaultdict(list)
        for layer in report.layers:
            for name in layer.names:
                kind = kind_of(name)
                assert kind is not None, name
                original = self.model.bert.encoder.get_submodule(name)
                x = self.inputs[name]
                with torch.no_grad():
                    wanted = x @ original.weight.T
                    got = encoder.get_submodule(name)(x) - original.bias
                weights[kind].append(layer.error)
                layers[kind].append(float((got - wanted).norm() / wanted.norm()))
        states, logits = self.run(quantised)
        return {
            "weights": {kind: sum(found) / len(found) for kind, found in weights.items()},
            "layers": {kind: sum(found) / len(found) for kind, found in layers.items()},
            "cosine": float(torch.cosine_similarity(states, self.states).mean()),
            "least_cosine": float(torch.cosine_similarity(states, self.states).min()),
            "changed": float((logits.argmax(-1) != self.logits.argmax(-1)).float().mean()),
        }


def main() -> None:
    options = arguments(__doc__)
    report = Report("wide_quality", options.quick)
    quality = Quality(options.quick)
    rows = []
    for label, chosen in CASES[-1:] if options.quick else CASES:
        values = quality.values(**chosen)
        report.values[label] = values
        both = [f"{values['weights'][kind]:.3f} / {values['layers'][kind]:.3f}" for kind in KINDS.values()]
        rows.append(
            [label, *both, f"{values['cosine']:.4f}", f"{values['least_cosine']:.4f}", f"{values['changed']:.4f}"]
        )
    columns = ["Format", *KINDS.values(), "Mean cosine", "Min. cosine", "Residues changed"]
    note = (
        "AntiBERTy, width 512 and 2048: mean error of the weights / of the layers' outputs on "
        f"{int(quality.mask.sum())} tokens of {len(quality.ids)} antibody chains; the whole model beside float32."
    )
    report.tables["wide_quality"] = Table(columns, rows, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
