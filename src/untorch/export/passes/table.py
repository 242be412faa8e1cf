"""Every graph pass, registered once, in the order in which they run.

From this table come PASS_NAMES, the check of the option ``passes``, the docstring of ExportOptions, and the table in
docs/export.md (scripts/render_passes.py). Passes that compute constants run first, so that later ones see the
results, but behind serve_pt2e_linears and serve_pt2e_convolutions, since they would widen int8 weights. drop_dead_code
runs before select_rows_early, fuse_int8_linears and pack_linears, which look at a node's only user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from untorch import _core
from untorch.export.passes.attention_in_bfloat16 import attention_in_bfloat16
from untorch.export.passes.channels_last_weights import channels_last_weights
from untorch.export.passes.choose_attention import choose_attention
from untorch.export.passes.compose_linears import compose_linears
from untorch.export.passes.cond_predicates_to_host import cond_predicates_to_host
from untorch.export.passes.conv1d_as_conv2d import conv1d_as_conv2d
from untorch.export.passes.crop_kernels import crop_kernels
from untorch.export.passes.decompose_flex_attention import decompose_flex_attention
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.drop_inference_dropout import drop_inference_dropout
from untorch.export.passes.exact_floor_division import exact_floor_division
from untorch.export.passes.fold_channel_factors import fold_channel_factors
from untorch.export.passes.fold_constants import fold_constants
from untorch.export.passes.fuse_attention import fuse_attention
from untorch.export.passes.fuse_convolutions import fuse_convolutions
from untorch.export.passes.fuse_decoder_linears import fuse_decoder_linears
from untorch.export.passes.fuse_int8_linears import fuse_int8_linears
from untorch.export.passes.fuse_rope_cache import fuse_rope_cache
from untorch.export.passes.merge_linears import merge_linears
from untorch.export.passes.merge_parallel_convolutions import merge_parallel_convolutions
from untorch.export.passes.name_torchao_weights import name_torchao_weights
from untorch.export.passes.pack_convolutions import pack_convolutions
from untorch.export.passes.pack_linears import pack_linears
from untorch.export.passes.paged_attention_kernels import paged_attention_kernels
from untorch.export.passes.quantize_activations import quantize_activations
from untorch.export.passes.quantize_int4_activations import quantize_int4_activations
from untorch.export.passes.recurrent_kernels import recurrent_kernels
from untorch.export.passes.repack_int4 import repack_int4
from untorch.export.passes.report import PassReport
from untorch.export.passes.resize_after_convolution import resize_after_convolution
from untorch.export.passes.restore_views import restore_views
from untorch.export.passes.select_rows_early import select_rows_early
from untorch.export.passes.serve_grouped_mm import serve_grouped_mm
from untorch.export.passes.serve_pt2e_convolutions import serve_pt2e_convolutions
from untorch.export.passes.serve_pt2e_embeddings import serve_pt2e_embeddings
from untorch.export.passes.serve_pt2e_linears import serve_pt2e_linears
from untorch.export.passes.serve_recurrent import serve_recurrent
from untorch.export.passes.tune_convolutions import tune_convolutions
from untorch.export.passes.widen_half_convolutions import widen_half_convolutions

if TYPE_CHECKING:
    from untorch.export.options import ExportOptions

__all__ = ["PASSES", "PASS_NAMES", "Pass", "render_table"]


def _is_for_amx(options: ExportOptions) -> bool:
    """Whether the file runs on CPUs as this one only, which has AMX."""
    return options.cpu == "native" and "amx" in _core.cpu_extensions().split()


_DEVICE_NAMES = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class Pass:
    """One pass.

    run: changes the module in place, for a method on a device ("cpu", "cuda") and a GPU architecture ("sm_90", None).
    purpose: what it is for, as Markdown for docs/export.md.
    default: whether it runs unless the option ``passes`` says otherwise; a tuple: for which devices it does.
    devices: the target devices it is for.
    option: the field of ExportOptions, a bool, that switches it off as well.
    """

    name: str
    run: Callable[[fx.GraphModule, ExportOptions, str, str | None], PassReport]
    purpose: str
    default: bool | tuple[str, ...] = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    option: str | None = None

    def reason_not_to_run(self, options: ExportOptions, device: str) -> str | None:
        """Why the pass does not run for this method; None if it does."""
        wanted = options.passes.get(self.name)
        if wanted is False or (wanted is None and self.default is False):
            return "it is switched off by the option passes"
        if self.option is not None and not getattr(options, self.option):
            return f"it is switched off by the option {self.option}"
        if device not in self.devices:
            return f"it is for {' and '.join(self.devices)}, and the method is for {device}"
        if wanted is None and isinstance(self.default, tuple) and device not in self.default:
            return f"it runs by default for {' and '.join(self.default)} only: the option passes switches it on"
        return None

    @property
    def default_text(self) -> str:
        """For the table: "on", "off", or the devices."""
        if isinstance(self.default, tuple):
            return " and ".join(_DEVICE_NAMES[device] for device in self.default)
        return "on" if self.default else "off"


PASSES = (
    Pass(
        "decompose_flex_attention",
        lambda module, options, device, architecture: decompose_flex_attention(module),
        "makes GEMMs and a softmax from `flex_attention`, with its functions for scores and masks compiled in between. "
        "Inductor's kernel for CPUs needs libtorch. The block mask's table is not used: all blocks are computed",
        devices=("cpu",),
    ),
    Pass(
        "drop_inference_dropout",
        lambda module, options, device, architecture: drop_inference_dropout(module),
        "removes dropout that is switched off: it computes nothing, and keeps a linear layer from being fused with "
        "what follows",
    ),
    Pass(
        "cond_predicates_to_host",
        lambda module, options, device, architecture: cond_predicates_to_host(module),
        "decides `torch.cond` where the predicate is a constant of the model, or computed from constants: the branch "
        "that is taken replaces it. Otherwise a predicate on a GPU makes each call wait. A predicate that depends on "
        "inputs, or that the model writes, stays",
    ),
    Pass(
        "restore_views",
        lambda module, options, device, architecture: restore_views(module),
        "turns copies of views (`permute_copy`, `slice_copy` …), which functionalised programs have, back into views, "
        "where nothing writes into the memory and no output would share memory or get other strides",
    ),
    Pass(
        "fuse_attention",
        lambda module, options, device, architecture: fuse_attention(module, options.attention),
        "makes `scaled_dot_product_attention` from attention that is written as a GEMM, a scale, masks, a softmax and "
        "a GEMM, with views between, where nothing else reads scores or probabilities. Rows whose keys are all masked "
        "by -inf give 0, as they do there, and not NaN. In bfloat16 and float16, too, the scores being float32 "
        "then. Not with active dropout, with values "
        "of another width than the keys, and where the option `attention` asks for something else than the library's "
        "kernel",
        devices=("cpu",),
    ),
    Pass(
        "name_torchao_weights",
        lambda module, options, device, architecture: name_torchao_weights(module),
        "names in the report the weights of torchao (`quantize_`) whose operators stay in the graph",
    ),
    Pass(
        "serve_pt2e_embeddings",
        lambda module, options, device, architecture: serve_pt2e_embeddings(module),
        "gathers rows of tables of embeddings that PT2E quantised before they are dequantised",
    ),
    Pass(
        "serve_pt2e_convolutions",
        lambda module, options, device, architecture: serve_pt2e_convolutions(module),
        "makes `untorch::int8_convolution` from 1-D, 2-D and transposed 2-D convolutions that PT2E quantised "
        "(`convert_pt2e`), with activation, residual sum and the quantising operator behind them; between them, and "
        "through max pooling, values are uint8 "
        "([decision](decisions/0053-keep-chains-of-convolutions-in-uint8.md))",
        devices=("cpu",),
    ),
    Pass(
        "serve_pt2e_linears",
        lambda module, options, device, architecture: serve_pt2e_linears(module),
        "makes `untorch::int8_linear` from linear layers that PT2E quantised (`convert_pt2e`): int8 weights, and "
        "static or dynamic ranges of whole tensors for activations. Other operators between quantising and "
        "dequantising ones stay in floating point, and are in the report with the reason",
        devices=("cpu",),
    ),
    Pass(
        "fold_constants",
        lambda module, options, device, architecture: fold_constants(module, options.fold_limit),
        "computes what depends on the model's own tensors only, and stores the result, also of tensors that the model "
        "makes and then writes (masks of shifted windows). Not for random operators, parameters and buffers that the "
        "model writes, views, and what is made from numbers only (`arange`). A result has at most "
        "`fold_limit` bytes; all together may add that much to what they replace",
    ),
    Pass(
        "exact_floor_division",
        lambda module, options, device, architecture: exact_floor_division(module),
        "keeps `//`, `torch.div` with a rounding mode and `torch.fmod` of integers exact where an operand is a 0-D "
        "constant: [Inductor](https://github.com/pytorch/pytorch/issues/186164) takes it for a float, and `-7 // 3` "
        "becomes -2",
    ),
    Pass(
        "conv1d_as_conv2d",
        lambda module, options, device, architecture: conv1d_as_conv2d(module),
        "gives 1-D convolutions a height of one, as Inductor's Triton convolutions are for images. Transposed, dilated "
        "and depthwise ones stay",
        devices=("cuda",),
    ),
    Pass(
        "choose_attention",
        lambda module, options, device, architecture: choose_attention(module, options.attention, device, architecture),
        "decides what computes [attention](#attention), as the option `attention` says",
    ),
    Pass(
        "attention_in_bfloat16",
        lambda module, options, device, architecture: attention_in_bfloat16(module),
        "with `bfloat16_attention`: rounds queries, keys and values of attention in float32 to bfloat16, and makes the "
        "result float32 again. Masks stay in float32",
        devices=("cpu",),
        option="bfloat16_attention",
    ),
    Pass(
        "paged_attention_kernels",
        lambda module, options, device, architecture: paged_attention_kernels(module, architecture),
        "gives `untorch::paged_attention` the Triton kernels that are compiled into the file: the library has one for "
        "CPUs only ([decision](decisions/0038-compile-paged-attention-into-the-package.md))",
        devices=("cuda",),
    ),
    Pass(
        "fuse_rope_cache",
        lambda module, options, device, architecture: fuse_rope_cache(module),
        "puts the norms of query and key heads, the rotary embedding and the write of keys and values to pages into "
        "one kernel, `untorch::rope_cache_triton`. It is found by what the graph computes, which random values show; "
        "other rotations stay ([decision](decisions/0047-merge-linears-of-the-same-input.md))",
        devices=("cuda",),
    ),
    Pass(
        "recurrent_kernels",
        lambda module, options, device, architecture: recurrent_kernels(module),
        "gives `untorch::causal_conv1d` and `untorch::gated_delta_rule` the Triton kernels that are compiled into the "
        "file: the library has them for CPUs only "
        "([decision](decisions/0041-keep-recurrent-states-in-a-pool-of-slots.md))",
        devices=("cuda",),
    ),
    Pass(
        "repack_int4",
        lambda module, options, device, architecture: repack_int4(module),
        "PyTorch's `_weight_int4pack_mm_for_cpu`, whose weights are packed for the vectors of the CPU that packed "
        "them, becomes `untorch::int4_linear` with the same values in a layout that any CPU reads. Weights that are no "
        "constants stay, and are refused",
        devices=("cpu",),
    ),
    Pass(
        "serve_grouped_mm",
        lambda module, options, device, architecture: serve_grouped_mm(module),
        "makes `untorch::moe_grouped_mm`, which has a C function, from PyTorch's `_grouped_mm` of sorted tokens and "
        "from transformers' `grouped_mm_fallback`, which mixtures of experts call where the weights are not bfloat16. "
        "Other dtypes than bfloat16, float16 and float32 stay, and groups of columns or of K",
    ),
    Pass(
        "serve_recurrent",
        lambda module, options, device, architecture: serve_recurrent(module, device),
        "makes one operator of each layer of RNN, LSTM and GRU modules with constant weights, which Inductor unrolls, "
        "for one length. On CPUs `untorch::recurrent_layer` for a direction, with packed weights; half types are "
        "computed in float32, from bfloat16 weights of the hidden state. On GPUs a linear layer for all steps, then "
        "`untorch::recurrent_steps` for both directions ([decision]"
        "(decisions/0080-run-all-steps-of-a-recurrent-layer-in-one-kernel.md)). Layers with `proj_size` stay; a "
        "dynamic length of theirs is refused",
    ),
    Pass(
        "drop_dead_code",
        lambda module, options, device, architecture: drop_dead_code(module),
        "removes what nothing uses, tensors too. Writes, random numbers and checks stay",
    ),
    Pass(
        "select_rows_early",
        lambda module, options, device, architecture: select_rows_early(module),
        "selects rows before linear layers, norms and activations, where a model does it behind them: of the last "
        "layer of a vision transformer only the class token goes through the MLP, of that of a language model's "
        "prefill only the last token of each sequence. Where the example inputs select at most one row of eight",
    ),
    Pass(
        "merge_linears",
        lambda module, options, device, architecture: merge_linears(module, options.kept_weights),
        "makes one GEMM of linear layers with the same input (q, k and v; gate and up), int4 and NVFP4 among them: the "
        "weights are stored as one, and the results are views of one. Few tokens are bound by memory and launches, "
        "many lose nothing. Weights that are tied, written, or named by `keep_weights` stay apart, other dtypes and "
        "quantisation, and layers whose results would have to be copied "
        "([decision](decisions/0047-merge-linears-of-the-same-input.md))",
        default=("cuda",),
    ),
    Pass(
        "fuse_decoder_linears",
        lambda module, options, device, architecture: fuse_decoder_linears(module, architecture),
        "makes one operator, `untorch::decoder_linears`, of a decoder's int4 layers between one attention and the "
        "next: output projection, SwiGLU MLP, the next layer's q, k and v, with the residual sums and RMSNorms "
        "between them. On sm_90 and newer, one token is one launch. Layers are found by what the graph computes, "
        "which random values show, with widths that are multiples of 256, up to 8192. Layers with a bias (q, k and v "
        "may have one), dense weights, other activations, norms behind layers (Gemma 2), and adapters stay, and are "
        "in the report with the reason "
        "([decision](decisions/0067-multiply-a-decoders-int4-layers-in-one-persistent-kernel.md))",
        devices=("cuda",),
    ),
    Pass(
        "quantize_int4_activations",
        lambda module, options, device, architecture: quantize_int4_activations(module),
        "with `int8_activations`: makes `untorch::w4a8_linear` of `untorch::int4_linear` with constant weights, and "
        "`untorch::nvfp4_int8_linear` of `untorch::nvfp4_linear`; experts keep their operators. Weights are repacked: "
        "activations are quantised to int8 in parts of 32, and CPUs multiply in integers "
        "([decision](decisions/0058-multiply-int4-with-int8-activations.md))",
        devices=("cpu",),
        option="int8_activations",
    ),
    Pass(
        "resize_after_convolution",
        lambda module, options, device, architecture: resize_after_convolution(module),
        "computes 1 x 1 convolutions before images are enlarged (`interpolate`), where models do it after, also of "
        "several that are concatenated: SegFormer's and DeepLab's decoders. Enlarging and such a convolution can be "
        "exchanged, and it then has fewer pixels; batch norm goes into the weights. Where the enlarged image has less "
        "than twice the pixels, or sizes that vary, it stays",
    ),
    Pass(
        "compose_linears",
        lambda module, options, device, architecture: compose_linears(module, options.kept_weights),
        "makes one linear layer of two that follow each other, linear layers or 1 x 1 convolutions with views between, "
        "where the product of their weights is at most nine tenths of the work: SegFormer's decoder, together with the "
        "pass before. Layers that `keep_weights` names stay",
    ),
    Pass(
        "crop_kernels",
        lambda module, options, device, architecture: crop_kernels(module, options.kept_weights),
        "removes taps of a convolution's kernel that read padding alone, where sizes are known: a 3 x 3 kernel on an "
        "image of one pixel is a 1 x 1 kernel. Weights that `keep_weights` names stay",
    ),
    Pass(
        "fold_channel_factors",
        lambda module, options, device, architecture: fold_channel_factors(module, options.kept_weights),
        "puts constant factors and summands of channels behind a convolution into its weight and bias: batch norm with "
        "fixed statistics, as DETR, RT-DETR and torchvision's detection models have it. The weight is computed in "
        "float64. Weights that `keep_weights` names stay",
    ),
    Pass(
        "merge_parallel_convolutions",
        lambda module, options, device, architecture: merge_parallel_convolutions(module, options.kept_weights),
        "makes one convolution of a sum of convolutions of one input, with batch norm of inference behind them or of "
        "the input alone: blocks of RepVGG, MobileOne and RT-DETR, as they are trained. A smaller kernel lies in the "
        "middle of a larger one. Weights are summed in float64; those that `keep_weights` names stay",
    ),
    Pass(
        "fuse_convolutions",
        lambda module, options, device, architecture: fuse_convolutions(module, options.kept_weights),
        "makes one operator, `untorch::fused_convolution`, of a 2-D or 3-D convolution with a constant weight and what "
        "follows: batch norm of inference, a residual sum of the same layout, ReLU. cuDNN has such kernels compiled, "
        "channels last, and they take the time of the convolution alone. Depthwise ones are ours, and take any "
        "activation. Other convolutions of the graph become that operator too, so that all have one layout. Weights "
        "that `keep_weights` names stay, and graphs that it would give nothing "
        "([decision](decisions/0074-fuse-convolutions-on-gpus.md))",
        devices=("cuda",),
    ),
    Pass(
        "tune_convolutions",
        lambda module, options, device, architecture: tune_convolutions(module),
        "times cuDNN's algorithms for each `untorch::fused_convolution`, where the file is made on a GPU, and stores "
        "the fastest one's name in the call. On other GPUs, with another cuDNN and for other sizes cuDNN chooses",
        devices=("cuda",),
    ),
    Pass(
        "channels_last_weights",
        lambda module, options, device, architecture: channels_last_weights(module),
        "stores constant weights of 2-D convolutions with the channel innermost, as cuDNN's kernels take them; "
        "otherwise generated code copies them at every call. Not in graphs with grouped convolutions, whose layout "
        "Inductor chooses",
        devices=("cuda",),
    ),
    Pass(
        "widen_half_convolutions",
        lambda module, options, device, architecture: widen_half_convolutions(module),
        "computes convolutions in bfloat16 and float16, and the operators between them (batch norm, activations, sums, "
        "concatenation, pooling, resizing), in float32, which needs no rounding in between. Dense convolutions in "
        "bfloat16 keep their weights in it: AMX and, on AMD's CPUs, AVX512_BF16 multiply them, with inputs rounded to "
        "bfloat16 and sums in float32. Other weights become float32, and so does the file's size for them",
        devices=("cpu",),
    ),
    Pass(
        "pack_convolutions",
        lambda module, options, device, architecture: pack_convolutions(module, _is_for_amx(options)),
        "makes one operator of our own from a 1-D or 2-D convolution with a constant weight and what follows: batch "
        "norm of inference, an activation, a residual sum of the same layout. It computes channels last and in "
        "float32, so a chain of convolutions needs no conversions, and the weight is stored in the kernel's layout "
        "([decision](decisions/0035-compute-cpu-convolutions-channels-last-with-packed-weights.md)). 3-D "
        "convolutions stay, and transposed ones, unless stride and kernel are the same. 3×3 kernels in bfloat16, which "
        "are float32 in Winograd's form, stay bfloat16 where the option cpu is native and this CPU has AMX",
        devices=("cpu",),
    ),
    Pass(
        "fuse_int8_linears",
        lambda module, options, device, architecture: fuse_int8_linears(module),
        "gives `untorch::int8_linear` the activation behind it and a residual sum of the same layout, as "
        "`pack_linears` does for layers in floating point "
        "([decision](decisions/0049-multiply-int8-with-dynamic-uint8-rows.md))",
        devices=("cpu",),
    ),
    Pass(
        "quantize_activations",
        lambda module, options, device, architecture: quantize_activations(module),
        "with `quantize={'dtype': 'int8', 'calibration': batches}`: runs the batches through the graph, makes "
        "`untorch::int8_convolution` from packed convolutions, and gives linear layers in int8 static ranges. Between "
        "convolutions, and through max pooling, values are uint8 "
        "([decision](decisions/0053-keep-chains-of-convolutions-in-uint8.md))",
        devices=("cpu",),
    ),
    Pass(
        "pack_linears",
        lambda module, options, device, architecture: pack_linears(module),
        "makes one operator of our own from a linear layer with a constant weight (float32, bfloat16, float16), or a "
        "GEMM with a constant on the right (`addmm`, `mm`, `matmul`: GPT-2's layers), the activation behind it (ReLU, "
        "ReLU6, SiLU, hard swish, hard sigmoid, tanh, sigmoid, GELU in both forms) and a residual sum of the same "
        "layout. The weight is stored in the kernel's layout, so it is not packed at run time "
        "([decision](decisions/0002-prepack-linear-weights-at-export.md)). "
        "Layers with fewer than 16 outputs or 4 inputs are left alone",
        devices=("cpu",),
        option="pack_linears",
    ),
)

PASS_NAMES = tuple(entry.name for entry in PASSES)


def render_table() -> str:
    """The table of passes as Markdown."""
    rows = ["| pass | default | targets | what it does |", "|---|---|---|---|"]
    for entry in PASSES:
        targets = ", ".join(_DEVICE_NAMES[device] for device in entry.devices)
        rows.append(f"| `{entry.name}` | {entry.default_text} | {targets} | {entry.purpose} |")
    return "\n".join(rows) + "\n"
