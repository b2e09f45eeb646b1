"""Long prompts over several processes (ZDC section 5.3): `sequence_parallel(model, group)`."""

from .sequence import SequenceParallel, sequence_parallel

__all__ = ["SequenceParallel", "sequence_parallel"]
