"""What the connectivity of a model did during a training, in files: written, and read again."""

from dynsparse.training.records.files import RecordedLayer, RecordError
from dynsparse.training.records.recorder import DeadUnits, Recorder, Records

__all__ = ["DeadUnits", "RecordError", "RecordedLayer", "Recorder", "Records"]
