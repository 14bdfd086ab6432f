"""Train a model through any agent program, unmodified: exact tokens, exact context, fair rewards."""

from .config import RolloutConfig, load_config, load_task
from .errors import PolarError
from .records import (
    Attempt,
    ChatRequest,
    Completion,
    CompletionSession,
    Evaluation,
    Generation,
    Message,
    Status,
    TaskSpec,
    Tool,
    ToolCall,
    Trace,
    Trajectory,
)

__all__ = [
    "Attempt",
    "ChatRequest",
    "Completion",
    "CompletionSession",
    "Evaluation",
    "Generation",
    "Message",
    "PolarError",
    "RolloutConfig",
    "Status",
    "TaskSpec",
    "Tool",
    "ToolCall",
    "Trace",
    "Trajectory",
    "load_config",
    "load_task",
]
