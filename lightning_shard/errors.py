"""Every error this package raises on purpose.

::

    ShardError                                what users catch
    ├── ConfigurationError (ValueError)       a setting that can't work; raised at setup
    │   ├── LayoutError                       axis sizes and ranks
    │   ├── PlacementError                    blocks, stages and what belongs to them
    │   └── PlanError                         a tensor-parallel plan
    ├── StepError (RuntimeError)              a training or evaluation step that can't be run in parallel
    │   └── BatchError                        its batch can't be split into microbatches
    ├── RankFailure (RuntimeError)            another rank failed first; the message says which and why
    └── CheckpointError (RuntimeError)
        ├── CheckpointNotFoundError           no manifest at this path
        ├── CheckpointConflictError           another save or removal came first
        ├── FormatVersionError                written by a newer version of the format
        ├── CorruptCheckpointError            a file is missing, truncated, or its digest differs
        ├── StateMismatchError                names, shapes or dtypes differ from what is being loaded into
        └── UnsupportedStateError             a value that the format can't hold; names its key

A message states the value, the constraint and the remedy.
"""

__all__ = [
    "BatchError",
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointNotFoundError",
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


class ShardError(Exception):
    """The root of this package's errors."""


class ConfigurationError(ShardError, ValueError):
    """A setting that can't work."""


class LayoutError(ConfigurationError):
    """Axis sizes that don't fit each other or the world."""


class PlacementError(ConfigurationError):
    """Blocks that aren't found, or can't be placed on the stages."""


class PlanError(ConfigurationError):
    """A tensor-parallel plan that doesn't fit the model."""


class StepError(ShardError, RuntimeError):
    """A step that can't be run in parallel as it is written."""


class BatchError(StepError):
    """A batch that can't be split into microbatches."""


class RankFailure(ShardError, RuntimeError):
    """Another rank failed first."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint that can't be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path."""


class CheckpointConflictError(CheckpointError):
    """Since this save began, another one has put its checkpoint at the path. That one stays."""


class FormatVersionError(CheckpointError):
    """The checkpoint is of a newer format version than this package reads."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, truncated, or differs from its digest."""


class StateMismatchError(CheckpointError):
    """The checkpoint's tensors aren't those of the state it is loaded into."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A value in the state that the format can't hold."""
