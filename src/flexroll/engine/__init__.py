"""The rollout engine: torch only, no knowledge of benchmarks. Start reading at `engine.Engine`."""

from flexroll.engine.engine import Completion, Engine
from flexroll.engine.sampling import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]
