"""Sparse models in ONNX files of standard operators, and back.

Needs the packages onnx and onnxscript to export, onnx2torch to import.
"""

from dynsparse.integrations.onnx.exporting import export
from dynsparse.integrations.onnx.importing import import_
from dynsparse.integrations.onnx.tools import sparsify_onnx, weights_from_onnx, weights_to_onnx

__all__ = ["export", "import_", "sparsify_onnx", "weights_from_onnx", "weights_to_onnx"]
