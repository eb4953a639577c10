"""The exception classes of this package: every error that it raises on purpose.

A message states the value, the constraint and the remedy.
"""

__all__ = [
    "BatchError",
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "ConfigurationError",
    "CorruptCheckpointError",
    "FormatVersionError",
    "LayoutError",
    "PlacementError",
    "PlanError",
    "RankFailure",
    "ShardError",
    "StateMismatchError",
    "StepError",
    "UnsupportedStateError",
]


WHOLE_BATCHES = "microbatches=1 (stages then wait for each other)"
"""A remedy where one process has a batch at once: with a single microbatch, so do stages."""


_SHOWN = 400
"""Characters of another library's message."""


def in_one_line(error: BaseException) -> str:
    """What another library's error says, for a message of ours: of lists of DTensors torch describes each."""
    said = " ".join(str(error).split())
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]} …"


class ShardError(Exception):
    """Base class of this package's errors: what users catch."""


class _Refusal(ShardError):
    """What can't be run in parallel as it is.

    Attributes:
        breaks: The number of the contract's sentence that it breaks (``docs/contract.md``); the message ends with it;
            ``None`` if an axis or a setting asks more than the contract, as the message then says.
    """

    def __init__(self, message: str = "", *, breaks: int | None = None) -> None:
        super().__init__(message if breaks is None else f"{message} (Sentence {breaks} of the contract.)")
        self.breaks = breaks


class ConfigurationError(_Refusal, ValueError):
    """A setting, or a module, that can't work; raised at setup."""


class LayoutError(ConfigurationError):
    """Sizes of parallel axes that don't fit each other or the world size."""


class PlacementError(ConfigurationError):
    """Blocks that aren't found, or can't be placed on the pipeline stages."""


class PlanError(ConfigurationError):
    """A tensor-parallel plan that doesn't fit the model."""


class StepError(_Refusal, RuntimeError):
    """A step that can't be run in parallel as it is written."""


class BatchError(StepError):
    """A batch that can't be split into microbatches."""


class RankFailure(ShardError, RuntimeError):
    """Another rank failed first; the message says which one, and its error."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint that can't be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path."""


class CheckpointConflictError(CheckpointError):
    """Another save to the same path, or its removal, came first after this save began. The other checkpoint stays."""


class FormatVersionError(CheckpointError):
    """The checkpoint has a newer format version than this package can read."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, truncated, or differs from its digest."""


class CheckpointReplacedError(CorruptCheckpointError):
    """The checkpoint was replaced or removed while it was being read. What is at the path now can be opened again."""


class StateMismatchError(CheckpointError):
    """The checkpoint's tensors differ in name, shape or dtype from the state that they are loaded into."""


class UnsupportedStateError(CheckpointError, TypeError):
    """The state has a value that the checkpoint format can't hold; the message names its key."""
