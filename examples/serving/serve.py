"""Serve an ONNX model with sparse layers over HTTP, without torch or dynsparse.

    MODEL=model.onnx LIBRARY=libdynsparse.so uvicorn serve:app
    curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"x": [[0.5, 0.25]]}'

MODEL is a file of `dynsparse.integrations.onnx.export(..., weights="operator")` with one output,
whose one input is float32 [batch, features] with a dynamic batch (`dynamic_shapes`). LIBRARY is a
copy of `dynsparse.integrations.onnxruntime.library()`.
"""

import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

options = onnxruntime.SessionOptions()
options.register_custom_ops_library(os.environ["LIBRARY"])
session = onnxruntime.InferenceSession(os.environ["MODEL"], options)
model_input = session.get_inputs()[0]
features = model_input.shape[-1]
app = FastAPI()


class Batch(BaseModel):
    x: list[list[float]]


@app.post("/predict")
def predict(batch: Batch) -> dict[str, list[list[float]]]:
    if not batch.x or any(len(sample) != features for sample in batch.x):
        raise HTTPException(422, f"x must be [batch, {features}]")
    x = np.asarray(batch.x, np.float32)
    return {"y": session.run(None, {model_input.name: x})[0].tolist()}
