"""All experiments, in the order of the story."""

from .cost import CENSUS, DECODING
from .memory import CAPACITY, OVERWRITING, STABILITY
from .numerics import CHUNKS, EQUALITY
from .recall import BOUND, FORGETTING, HYBRIDS, RECALL
from .text import DEPTH, LANGUAGE, ROUTER

EXPERIMENTS = (
    DECODING,
    CAPACITY,
    OVERWRITING,
    EQUALITY,
    CHUNKS,
    BOUND,
    RECALL,
    FORGETTING,
    STABILITY,
    HYBRIDS,
    DEPTH,
    ROUTER,
    LANGUAGE,
    CENSUS,
)
