"""Records of a model's connectivity during a training: patterns, not dense masks.

A record is a folder: `record.json` describes the layers, `update-000000.npz` holds the first
patterns, every later `update-*.npz` what one pattern update dropped and grew, and
`telemetry.jsonl` logged figures. docs/records.md describes the format for readers without this
package.
"""

from dynsparse.training.records.files import RecordedLayer, RecordError
from dynsparse.training.records.reader import DeadUnits, Records
from dynsparse.training.records.recorder import Recorder

__all__ = ["DeadUnits", "RecordError", "RecordedLayer", "Recorder", "Records"]
