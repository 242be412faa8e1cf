"""Language models: an engine with continuous batching over a paged KV cache. Never imports torch."""

from untorch.llm.engine import Engine, EngineStats
from untorch.llm.handle import Generation
from untorch.llm.outputs import Chunk, Completion, RequestOutput, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.pooling import Pooling, PoolingOutput
from untorch.llm.prompt import Prompt
from untorch.llm.sampler import TokenLogprobs

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "EngineStats",
    "Generation",
    "Pooling",
    "PoolingOutput",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
]
